#include "checked/python_record.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>

#include "python_fields.h"

namespace nb = nanobind;

namespace cokernel::checked {

namespace {

Schedule schedule_from(nb::handle object) {
  Fields fields(object, "the schedule");
  Schedule schedule;
  try {
    schedule.strategy = strategy_from(fields.get<std::string>("strategy", "random"));
  } catch (const std::invalid_argument& error) {
    throw nb::value_error(error.what());
  }
  schedule.seed = fields.get<uint64_t>("seed", 0);
  schedule.depth = fields.get<int32_t>("depth", 3);
  schedule.launch = fields.get<int64_t>("launch", -1);
  schedule.choices = fields.get<std::vector<int32_t>>("choices", {});
  schedule.record = fields.get<bool>("record", false);
  fields.finish();
  return schedule;
}

nb::dict describe_schedule(const Schedule& schedule) {
  nb::dict result;
  result["strategy"] = name_of(schedule.strategy);
  result["seed"] = schedule.seed;
  result["depth"] = schedule.depth;
  result["launch"] = schedule.launch;
  result["choices"] = nb::cast(schedule.choices);
  return result;
}

nb::dict describe_place(const Place& place) {
  nb::dict result;
  result["owner"] = name_of(place.owner);
  result["index"] = place.index;
  result["program"] = place.program;
  result["offset"] = place.offset;
  return result;
}

nb::dict describe_party(const Executable& executable, const Party& party) {
  const ProgramSpec& program = executable.spec.programs[party.program];
  nb::dict result;
  result["program"] = party.program;
  result["program_name"] = program.name;
  nb::list coordinates;
  for (std::size_t axis = 0; axis < program.shape.size(); ++axis) {
    coordinates.append(party.coordinates[axis]);
  }
  result["coordinates"] = nb::tuple(coordinates);
  result["index"] = party.index;
  result["site"] = party.site;
  result["access"] = party.access;
  result["is_dma"] = party.is_dma;
  result["dma_site"] = party.dma_site;
  return result;
}

// Where in its mesh the core is that has a piece of private memory.
nb::tuple coordinates_of(const Executable& executable, const Place& place) {
  const std::vector<int64_t> shape(executable.spec.programs[place.program].shape.begin(),
                                   executable.spec.programs[place.program].shape.end());
  std::vector<int64_t> coordinates(shape.size());
  int64_t rest = place.index;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    coordinates[axis] = rest % shape[axis];
    rest /= shape[axis];
  }
  nb::list result;
  for (const int64_t coordinate : coordinates) result.append(coordinate);
  return nb::tuple(result);
}

nb::dict describe_memory(const Executable& executable, const MemoryRange& range) {
  nb::dict result = describe_place(range.place);
  if (range.place.owner == MemoryOwner::kPrivate) {
    result["coordinates"] = coordinates_of(executable, range.place);
  }
  nb::list parts;
  for (const auto& [begin, end] : range.parts.all()) {
    parts.append(nb::make_tuple(begin, end - begin));
  }
  result["parts"] = parts;
  result["is_cut_off"] = range.parts.is_cut_off();
  result["element_bytes"] = range.element_bytes;
  return result;
}

nb::dict describe_finding(const Executable& executable, const Finding& finding) {
  nb::dict result;
  result["kind"] = finding.kind;
  result["first"] = nb::none();
  if (finding.first.has_value()) result["first"] = describe_party(executable, *finding.first);
  result["second"] = nb::none();
  if (finding.second.has_value()) result["second"] = describe_party(executable, *finding.second);
  result["is_unwaited"] = finding.is_unwaited;
  result["is_too_early"] = finding.is_too_early;
  result["is_inexact"] = finding.is_inexact;
  if (!finding.more.empty()) {
    nb::list more;
    for (const Party& party : finding.more) more.append(describe_party(executable, party));
    result["more"] = more;
  }
  if (finding.allocator.has_value()) {
    result["allocator"] = describe_party(executable, *finding.allocator);
  }
  if (!finding.window.empty()) {
    nb::list window;
    for (const Span& span : finding.window) {
      window.append(nb::make_tuple(span.start, span.stop, span.extent));
    }
    result["window"] = window;
  }
  if (!finding.padding.elements.empty()) {
    nb::dict padding;
    nb::list shape, runs;
    for (const int64_t extent : finding.padding.shape) shape.append(extent);
    for (const auto& [begin, end] : finding.padding.elements.all()) {
      runs.append(nb::make_tuple(begin, end));
    }
    padding["shape"] = shape;
    padding["runs"] = runs;
    padding["is_cut_off"] = finding.padding.elements.is_cut_off();
    result["padding"] = padding;
  }
  result["memory"] = nb::none();
  int64_t count = 0;
  if (finding.memory.has_value()) {
    result["memory"] = describe_memory(executable, *finding.memory);
    const int64_t size = std::max<int64_t>(finding.memory->element_bytes, 1);
    count = std::max<int64_t>(finding.memory->parts.bytes() / size, 1);
  }
  result["semaphore"] = nb::none();
  if (finding.semaphore.has_value()) {
    nb::dict semaphore = describe_place(*finding.semaphore);
    semaphore["count"] = finding.semaphore_count;
    result["semaphore"] = semaphore;
  }
  result["count"] = count;
  result["occurrences"] = finding.occurrences;
  nb::list also;
  for (const auto& [first, second] : finding.also) {
    nb::list parties;
    parties.append(describe_party(executable, first));
    if (second.has_value()) parties.append(describe_party(executable, *second));
    also.append(parties);
  }
  result["also"] = also;
  nb::list polled;
  for (const Polled& look : finding.polled) {
    nb::dict described;
    described["party"] = describe_party(executable, look.party);
    described["memory"] = nb::none();
    if (look.memory.has_value()) described["memory"] = describe_memory(executable, *look.memory);
    described["semaphore"] = nb::none();
    if (look.semaphore.has_value()) {
      nb::dict semaphore = describe_place(*look.semaphore);
      semaphore["count"] = look.semaphore_count;
      described["semaphore"] = semaphore;
    }
    polled.append(described);
  }
  if (!finding.polled.empty()) result["polled"] = polled;
  if (finding.use != nullptr) result["use"] = finding.use;
  for (const auto& [name, value] : finding.numbers) result[name] = value;
  result["schedule"] = describe_schedule(finding.schedule);
  return result;
}

nb::list describe_signals(const Executable& executable, const std::vector<Starved::From>& all) {
  nb::list result;
  for (const Starved::From& from : all) {
    nb::dict described = describe_party(executable, from.party);
    described["moved"] = from.amount;
    described["times"] = from.times;
    result.append(described);
  }
  return result;
}

// To each core of a deadlock that waits for a semaphore, what else is counted that it could have
// meant; and if it waits for a copy, those that have signalled its semaphore.
void add_starved(const Executable& executable, const CheckedRecord& record, nb::object failure) {
  for (const Starved& starved : record.starved) {
    nb::object core = failure["cores"][nb::int_(starved.core)];
    if (starved.is_for_copies) core["copies"] = describe_signals(executable, starved.from);
    nb::list untaken;
    for (const Starved::Untaken& other : starved.untaken) {
      nb::dict described = describe_place(other.place);
      described["count"] = other.count;
      described["from"] = describe_signals(executable, other.from);
      untaken.append(described);
    }
    core["untaken"] = untaken;
  }
}

void set_fill(CheckedOptions& options, const nb::object& fill) {
  if (fill.is_none()) return;
  int64_t byte = 0;
  if (nb::try_cast<int64_t>(fill, byte)) {
    if (byte < 0 || byte > 255) throw nb::value_error("fill as a byte must be from 0 to 255");
    options.fill_byte = static_cast<uint8_t>(byte);
    return;
  }
  const auto name = nb::cast<std::string>(nb::str(fill));
  if (name == "nan") {
    options.fill_byte = 0xff;
  } else if (name == "zeros") {
    options.fill_byte = 0;
  } else if (name == "random") {
    options.fill = Fill::kRandom;
  } else if (name == "keep") {
    options.fill = Fill::kKeep;
  } else {
    throw nb::value_error("fill must be 'nan', 'zeros', 'random', 'keep' or a byte");
  }
}

}  // namespace

std::shared_ptr<const CheckedOptions> options_from(nb::handle object) {
  if (object.is_none()) return nullptr;
  Fields fields(object, "checked");
  auto options = std::make_shared<CheckedOptions>();
  options->races = fields.get<bool>("races", true);
  options->uninitialised = fields.get<bool>("uninitialised", true);
  options->leftovers = fields.get<bool>("leftovers", true);
  options->unwaited_copies = fields.get<bool>("unwaited_copies", true);
  options->stop_at_first = fields.get<bool>("stop_at_first", false);
  options->max_findings = fields.get<int64_t>("max_findings", 100);
  options->schedules = fields.get<int32_t>("schedules", 1);
  if (options->schedules < 1) throw nb::value_error("schedules must be at least 1");
  set_fill(*options, fields.optional("fill"));
  const nb::object schedule = fields.optional("schedule");
  if (!schedule.is_none()) options->schedule = schedule_from(schedule);
  const nb::object outputs = fields.optional("outputs");
  if (!outputs.is_none()) {
    for (nb::handle output : outputs) {
      nb::sequence pair = nb::cast<nb::sequence>(output);
      options->outputs.emplace_back(nb::cast<int32_t>(pair[0]), nb::cast<int64_t>(pair[1]));
    }
  }
  options->sees_all = fields.get<bool>("sees_all", false);
  options->batch = fields.get<std::vector<int32_t>>("batch", {});
  fields.finish();
  return options;
}

nb::object set_python_schedule(nb::object object) {
  std::optional<Schedule> schedule;
  if (!object.is_none()) schedule = schedule_from(object);
  const std::optional<Schedule> before = set_schedule(std::move(schedule));
  if (!before.has_value()) return nb::none();
  nb::dict result = describe_schedule(*before);
  result["record"] = before->record;
  return result;
}

nb::dict describe_record(const Executable& executable, const CheckedRecord& record,
                         nb::object failure) {
  nb::dict result;
  result["executable"] = executable.spec.name;
  nb::list findings;
  for (const Finding& finding : record.findings.all()) {
    findings.append(describe_finding(executable, finding));
  }
  result["findings"] = findings;
  result["dropped"] = record.findings.dropped();
  result["batch"] = nb::cast(record.batch);
  result["is_complete"] = record.is_complete;
  nb::dict schedule = describe_schedule(record.schedule);
  schedule["decisions"] = record.decisions;
  schedule["fits"] = record.fits;
  if (record.schedule.record) {
    schedule["choices"] = nb::cast(record.choices);
    nb::list decisions;
    for (const std::vector<Candidate>& candidates : record.candidates) {
      nb::list decision;
      for (const Candidate& candidate : candidates) {
        decision.append(nb::make_tuple(candidate.agent, candidate.operation,
                                       nb::tuple(nb::cast(candidate.objects)), candidate.core));
      }
      decisions.append(decision);
    }
    schedule["candidates"] = decisions;
    const auto describe_ranges = [](const std::vector<MemoryRange>& ranges) {
      nb::list described;
      for (const MemoryRange& range : ranges) {
        const Place& place = range.place;
        described.append(nb::make_tuple(name_of(place.owner), place.program, place.index,
                                        place.offset, place.offset + range.parts.bytes()));
      }
      return described;
    };
    nb::list effects;
    for (const Effects& one : record.effects) {
      effects.append(nb::make_tuple(describe_ranges(one.polled), describe_ranges(one.written),
                                    one.is_cut_off));
    }
    schedule["effects"] = effects;
    nb::list continuing;
    for (const bool continues : record.continuing) continuing.append(continues);
    schedule["continuing"] = continuing;
  }
  result["schedule"] = schedule;
  result["schedules"] = record.schedules;
  result["behaviour"] = record.behaviour;
  result["behaviours"] = record.behaviours;
  nb::dict counts;
  counts["accesses"] = record.counts.accesses;
  counts["signals"] = record.counts.signals;
  counts["waits"] = record.counts.waits;
  counts["barriers"] = record.counts.barriers;
  counts["dmas"] = record.counts.dmas;
  counts["cores"] = record.counts.cores;
  result["counts"] = counts;
  result["claimed"] = record.claimed;
  if (!failure.is_none()) {
    failure["schedule"] = describe_schedule(record.schedule);
    failure["use_site"] = record.failed_use_site;
    add_starved(executable, record, failure);
  }
  result["failure"] = failure;
  return result;
}

}  // namespace cokernel::checked

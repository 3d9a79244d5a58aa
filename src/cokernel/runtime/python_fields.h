// The fields of a dict that Python hands over.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <set>
#include <string>
#include <utility>

namespace cokernel {

// Reads the fields of a dict and complains about those that are missing, wrong or unknown.
class Fields {
 public:
  Fields(nanobind::handle object, std::string what) : what_(std::move(what)) {
    if (!nanobind::isinstance<nanobind::dict>(object))
      throw nanobind::type_error((what_ + " must be a dict").c_str());
    dict_ = nanobind::borrow<nanobind::dict>(object);
  }

  nanobind::object optional(const char* name) {
    seen_.insert(name);
    return dict_.contains(name) ? nanobind::object(dict_[name]) : nanobind::none();
  }

  nanobind::object required(const char* name) {
    nanobind::object value = optional(name);
    if (!dict_.contains(name)) {
      throw nanobind::value_error((what_ + " lacks '" + name + "'").c_str());
    }
    return value;
  }

  template <typename T>
  T get(const char* name) {
    return convert<T>(required(name), name);
  }

  template <typename T>
  T get(const char* name, T fallback) {
    nanobind::object value = optional(name);
    return value.is_none() ? std::move(fallback) : convert<T>(value, name);
  }

  void finish() {
    for (auto [key, value] : dict_) {
      const std::string name = nanobind::cast<std::string>(nanobind::str(key));
      if (seen_.count(name) == 0) {
        throw nanobind::value_error((what_ + " has an unknown field '" + name + "'").c_str());
      }
    }
  }

 private:
  template <typename T>
  T convert(const nanobind::object& value, const char* name) {
    T result{};
    if (!nanobind::try_cast<T>(value, result)) {
      throw nanobind::type_error((what_ + ": '" + name +
                                  "' has the wrong type or is out of range, got " +
                                  nanobind::cast<std::string>(nanobind::repr(value)))
                                     .c_str());
    }
    return result;
  }

  std::string what_;
  nanobind::dict dict_;
  std::set<std::string> seen_;
};

}  // namespace cokernel

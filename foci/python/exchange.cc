// DLPack's table by a tensor's type, looked up once a type.
#include "foci/python/exchange.h"

#include <array>
#include <cstdint>

namespace foci::python {
namespace {

// The published layouts, as far as they are used here.
struct ManagedTensor {
  uint32_t major, minor;
  void* context;
  void (*free)(ManagedTensor*);
  uint64_t flags;  // bit 0: read only
  nb::dlpack::dltensor tensor;
};
struct Table {
  uint32_t major, minor;
  const Table* previous;
  void* allocate;
  int (*describe)(void* object, ManagedTensor** to);
};
constexpr uint32_t kMajor = 1;
constexpr const char* kAttribute = "__dlpack_c_exchange_api__";

bool has_own(PyTypeObject* type, const char* name) {
  const auto own = nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dict__"));
  if (!own.is_valid()) {
    PyErr_Clear();
    return false;
  }
  const bool has = PyMapping_HasKeyString(own.ptr(), name) == 1;
  return has;
}

const Table* table_in(PyTypeObject* type) {
  PyTypeObject* base = type->tp_base;
  const bool plain_subclass = base != nullptr && has_own(base, kAttribute) &&
                              !has_own(type, "__torch_dispatch__") && !has_own(type, "__dlpack__");
  if (!has_own(type, kAttribute) && !plain_subclass) return nullptr;
  const auto capsule =
      nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), kAttribute));
  if (!capsule.is_valid() || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* table =
      static_cast<const Table*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (table != nullptr && table->major > kMajor) table = table->previous;
  return table != nullptr && table->major == kMajor ? table : nullptr;
}

// Tables by type, under the GIL. A type that is remembered is kept, lest another take its address.
const Table* table_of(PyTypeObject* type) {
  struct Known {
    PyTypeObject* type;
    const Table* table;
  };
  static std::array<Known, 8> known{};
  static size_t count = 0;
  for (size_t i = 0; i < count; ++i) {
    if (known[i].type == type) return known[i].table;
  }
  const Table* table = table_in(type);
  if (table != nullptr && count < known.size()) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    known[count++] = {type, table};
  }
  return table;
}

}  // namespace

Exchanged exchanged(nb::handle object) {
  const Table* table = table_of(Py_TYPE(object.ptr()));
  if (table == nullptr) return {};
  ManagedTensor* managed = nullptr;
  if (table->describe(object.ptr(), &managed) != 0 || managed == nullptr) {
    PyErr_Clear();
    return {};
  }
  const std::shared_ptr<ManagedTensor> owner(managed, [](ManagedTensor* m) {
    if (m->free != nullptr) m->free(m);
  });
  return {owner, &managed->tensor, (managed->flags & 1u) == 0};
}

}  // namespace foci::python

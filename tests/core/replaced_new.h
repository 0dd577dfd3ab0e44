// operator new and delete over malloc, aligned_alloc and free, for a program that counts what is
// asked of those (--wrap). They are definitions: include this in one source of a program.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

void* operator new(size_t n) {
  void* p = std::malloc(std::max<size_t>(n, 1));
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void* operator new(size_t n, std::align_val_t a) {
  const auto align = static_cast<size_t>(a);
  void* p = std::aligned_alloc(align, (std::max<size_t>(n, 1) + align - 1) / align * align);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void* operator new[](size_t n) {
  return operator new(n);
}
void* operator new[](size_t n, std::align_val_t a) {
  return operator new(n, a);
}
void* operator new(size_t n, const std::nothrow_t&) noexcept {
  return std::malloc(std::max<size_t>(n, 1));
}
void* operator new[](size_t n, const std::nothrow_t&) noexcept {
  return std::malloc(std::max<size_t>(n, 1));
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, size_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete(void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete(void* p, const std::nothrow_t&) noexcept {
  std::free(p);
}
void operator delete[](void* p, const std::nothrow_t&) noexcept {
  std::free(p);
}
void operator delete[](void* p) noexcept {
  std::free(p);
}
void operator delete[](void* p, size_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}

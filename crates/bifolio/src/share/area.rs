//! A piece of memory that two processes write: what a client asks of an owner, and the answers.
//!
//! Every access is checked against its length, and is of atomic words or an opaque copy. So
//! whatever another process writes there at any moment, a read returns some bytes, and no more: the
//! reader copies a word once, and checks the copy.
//!
//! The owner makes the memory, so its kind and its length are known: neither can raise SIGBUS. (A
//! client that made it could pass a file whose pages run out, such as one of huge pages.)
//!
//! # Safety
//! Accesses lie in a mapping that lives as long as the value, and whose length is sealed.
#![allow(unsafe_code)]

use crate::sync::{AtomicU32, AtomicU64};
use crate::sys::copy;
use crate::sys::view::SharedPages;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Memory that this process and another one read and write.
#[derive(Debug)]
pub struct SharedArea(SharedPages);

impl SharedArea {
    /// Makes memory of `length_bytes` zeros, whole pages, which become resident when they are
    /// touched.
    ///
    /// # Errors
    /// The kernel refuses a descriptor or the address space.
    pub fn create(length_bytes: usize) -> io::Result<Self> {
        SharedPages::create(length_bytes).map(Self)
    }

    /// Maps memory that another process has made.
    ///
    /// # Errors
    /// The memory has another length, which may change; the kernel refuses the address space.
    pub fn open(memory: OwnedFd, length_bytes: usize) -> io::Result<Self> {
        SharedPages::open(memory, length_bytes).map(Self)
    }

    /// Returns the descriptor for the other process.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }

    /// Returns the address of `length_bytes` bytes, which are aligned to `align_bytes`.
    ///
    /// # Panics
    /// If they are not in the memory, which is an error of this process alone.
    #[inline(always)]
    fn at(&self, offset_bytes: usize, length_bytes: usize, align_bytes: usize) -> *mut u8 {
        let memory = &self.0.memory;
        let inside = offset_bytes.checked_add(length_bytes).is_some_and(|end| end <= memory.len());
        assert!(inside, "bytes {offset_bytes}+{length_bytes} of {}", memory.len());
        assert!(offset_bytes.is_multiple_of(align_bytes), "word at byte {offset_bytes}");
        memory.base.wrapping_add(offset_bytes)
    }

    /// Returns the word of 8 bytes at an offset. Panics if it is not in the memory.
    #[inline(always)]
    pub fn word(&self, offset_bytes: usize) -> &AtomicU64 {
        let word = self.at(offset_bytes, size_of::<u64>(), size_of::<u64>());
        // SAFETY: `at` checked that the word is mapped and aligned; it lives as long as `self`, and
        // other threads and processes access it as an atomic word, too, or by opaque copies.
        unsafe { &*word.cast() }
    }

    /// Returns the word of 4 bytes at an offset, for a futex. Panics if it is not in the memory.
    #[inline(always)]
    pub fn futex(&self, offset_bytes: usize) -> &AtomicU32 {
        let word = self.at(offset_bytes, size_of::<u32>(), size_of::<u32>());
        // SAFETY: as for `word`.
        unsafe { &*word.cast() }
    }

    /// Copies bytes out of the memory. Panics if they are not in it.
    pub fn copy_out(&self, offset_bytes: usize, target: &mut [u8]) {
        let source = self.at(offset_bytes, target.len(), 1);
        // SAFETY: `at` checked that the bytes are mapped; `target` is the caller's own memory.
        unsafe { copy::copy_out(source, target) }
    }

    /// Copies bytes into the memory. Panics if they do not fit.
    pub fn copy_in(&self, offset_bytes: usize, source: &[u8]) {
        let target = self.at(offset_bytes, source.len(), 1);
        // SAFETY: `at` checked that the bytes are mapped and writable; `source` is the caller's own
        // memory. Another process that writes the same bytes tears them, which the protocol of the
        // caller excludes or tolerates.
        unsafe { copy::copy_in(target, source) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Ordering;

    #[test]
    fn two_mappings_are_one_memory() {
        let owner = SharedArea::create(8192).unwrap();
        let descriptor = owner.descriptor().try_clone_to_owned().unwrap();
        let client = SharedArea::open(descriptor, 8192).unwrap();
        owner.word(4096).store(7, Ordering::Relaxed);
        assert_eq!(client.word(4096).load(Ordering::Relaxed), 7);
        client.copy_in(8189, b"abc");
        let mut found = [0; 3];
        owner.copy_out(8189, &mut found);
        assert_eq!(&found, b"abc");
        let descriptor = owner.descriptor().try_clone_to_owned().unwrap();
        assert!(SharedArea::open(descriptor, 4096).is_err(), "of another length");
        let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&unsealed, 8192).unwrap();
        assert!(SharedArea::open(unsealed, 8192).is_err(), "its length may fall");
    }

    #[test]
    #[should_panic(expected = "bytes 8185+8 of 8192")]
    fn a_word_past_the_end_is_refused() {
        SharedArea::create(8192).unwrap().word(8185);
    }
}

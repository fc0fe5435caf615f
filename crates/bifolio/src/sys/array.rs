//! A fixed-size array of shared words in reserved memory: zero until touched, never moved.
//!
//! Holds the Entry tables (`page::table`) and the descriptors (`page`): both are far larger than
//! what is ever touched, and both are read without locks, so an element never moves while the array
//! exists. In a model run the elements are in a vector instead.
//!
//! A forked child sees zeros (or, where the kernel cannot wipe, its own copy); `cache` detects the
//! fork.
//!
//! # Safety
//! Converting reserved memory into `&T` relies on [`ZeroValid`].
#![allow(unsafe_code)]

/// Types for which zero bytes are a valid value, and which are shared between threads.
///
/// # Safety
/// All-zero memory must be a valid `Self`, and `Self` must not need dropping.
pub(crate) unsafe trait ZeroValid: Sync + Send + Default {}

#[cfg(not(all(test, loom)))]
pub(crate) use real::ReservedArray;
#[cfg(not(all(test, loom)))]
mod real {
    use super::ZeroValid;
    use crate::sys::memory::{PAGE_BYTES, Reservation};
    use std::marker::PhantomData;
    use std::ops::Range;
    use std::sync::atomic::AtomicU64;

    // SAFETY: an atomic word is valid when zero and needs no dropping.
    unsafe impl ZeroValid for AtomicU64 {}

    #[derive(Debug)]
    pub(crate) struct ReservedArray<T> {
        memory: Reservation,
        length: usize,
        elements: PhantomData<T>,
    }

    impl<T: ZeroValid> ReservedArray<T> {
        pub(crate) fn new(length: usize) -> std::io::Result<Self> {
            let bytes = length.checked_mul(size_of::<T>());
            let bytes = bytes.ok_or(std::io::ErrorKind::OutOfMemory)?;
            let memory = Reservation::new(bytes, align_of::<T>())?;
            memory.wipe_on_fork();
            // Pages are charged as they are touched, so none may be larger.
            memory.refuse_huge_pages();
            Ok(Self { memory, length, elements: PhantomData })
        }

        #[inline(always)]
        pub(crate) fn len(&self) -> usize {
            self.length
        }

        /// Returns the element at `index`. Panics past the end, which is a bug in this crate.
        #[inline(always)]
        pub(crate) fn get(&self, index: usize) -> &T {
            assert!(index < self.length, "element {index} of {}", self.length);
            // SAFETY: `index` is inside, checked just above.
            unsafe { self.get_unchecked(index) }
        }

        /// Returns the element at `index`, unchecked.
        ///
        /// # Safety
        /// `index` must be below [`Self::len`].
        #[inline(always)]
        pub(crate) unsafe fn get_unchecked(&self, index: usize) -> &T {
            let element = self.as_ptr().wrapping_add(index);
            // SAFETY: inside the reservation by contract, aligned by `new`, zero or a value that
            // was stored through `&T` (ZeroValid), and mapped as long as `self`.
            unsafe { &*element }
        }

        /// Returns the pages of some elements to the kernel: they are zero afterwards. The elements
        /// must fill whole pages, except at the end of the array. Returns `true` on success. (In a
        /// model run `reset` zeroes them.)
        pub(crate) fn release(&self, elements: Range<usize>, _reset: impl Fn(&T)) -> bool {
            let bytes = elements.start * size_of::<T>()..elements.end * size_of::<T>();
            let length_bytes = (bytes.end - bytes.start).next_multiple_of(PAGE_BYTES);
            self.memory.release(bytes.start, length_bytes).is_ok()
        }

        #[inline(always)]
        pub(crate) fn as_ptr(&self) -> *const T {
            self.memory.base.cast()
        }
    }
}

#[cfg(all(test, loom))]
pub(crate) use model::ReservedArray;
#[cfg(all(test, loom))]
mod model {
    use super::ZeroValid;

    #[derive(Debug)]
    pub(crate) struct ReservedArray<T>(Box<[T]>);

    impl<T: ZeroValid> ReservedArray<T> {
        pub(crate) fn new(length: usize) -> std::io::Result<Self> {
            Ok(Self((0..length).map(|_| T::default()).collect()))
        }

        pub(crate) fn release(&self, elements: std::ops::Range<usize>, reset: impl Fn(&T)) -> bool {
            self.0[elements].iter().for_each(reset);
            true
        }

        pub(crate) fn len(&self) -> usize {
            self.0.len()
        }

        pub(crate) fn get(&self, index: usize) -> &T {
            &self.0[index]
        }

        /// # Safety
        /// `index` must be below `len` (checked here anyway).
        pub(crate) unsafe fn get_unchecked(&self, index: usize) -> &T {
            &self.0[index]
        }

        pub(crate) fn as_ptr(&self) -> *const T {
            self.0.as_ptr()
        }
    }
}

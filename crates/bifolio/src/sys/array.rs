//! A fixed-size array of shared words in reserved memory: zero until touched, never moved.
//!
//! Holds the Entry tables (`page::table`) and the descriptors (`page`): both are far larger
//! than what is ever touched, both are read without locks, so an element must stay where it is for
//! the life of the array. In a model run the elements live in a vector instead.
//!
//! A child made by `fork` sees zeros (or, where the kernel cannot wipe, its own copy): `cache`
//! tells it so.
//!
//! # Safety
//! Turning reserved memory into `&T` relies on [`ZeroValid`].
#![allow(unsafe_code)]

/// Types for which a run of zero bytes is a valid value, and which are shared between threads.
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

    /// See the head of the file.
    #[derive(Debug)]
    pub(crate) struct ReservedArray<T> {
        memory: Reservation,
        length: usize,
        elements: PhantomData<T>,
    }

    impl<T: ZeroValid> ReservedArray<T> {
        /// Reserves address space for `length` elements.
        pub(crate) fn new(length: usize) -> std::io::Result<Self> {
            let bytes = length.checked_mul(size_of::<T>());
            let bytes = bytes.ok_or(std::io::ErrorKind::OutOfMemory)?;
            let memory = Reservation::new(bytes, align_of::<T>())?;
            memory.wipe_on_fork();
            // Pages are charged as they are touched: nothing may come in larger pieces.
            memory.refuse_huge_pages();
            Ok(Self { memory, length, elements: PhantomData })
        }

        /// How many elements there are.
        #[inline(always)]
        pub(crate) fn len(&self) -> usize {
            self.length
        }

        /// The element at `index`; panics past the end, which is a bug of ours.
        #[inline(always)]
        pub(crate) fn get(&self, index: usize) -> &T {
            assert!(index < self.length, "element {index} of {}", self.length);
            // SAFETY: `index` is inside, checked just above.
            unsafe { self.get_unchecked(index) }
        }

        /// The element at `index`, unchecked.
        ///
        /// # Safety
        /// `index` must be below [`Self::len`].
        #[inline(always)]
        pub(crate) unsafe fn get_unchecked(&self, index: usize) -> &T {
            let element = self.as_ptr().wrapping_add(index);
            // SAFETY: inside the reservation by contract, aligned by `new`, zero or a value
            // that went through `&T` (ZeroValid), and mapped as long as `self`.
            unsafe { &*element }
        }

        /// Gives the pages of some elements back, which fill whole pages, but for the last of the
        /// array: they are zero then. Whether the kernel took them. (In a model, `reset` zeroes.)
        pub(crate) fn release(&self, elements: Range<usize>, _reset: impl Fn(&T)) -> bool {
            let bytes = elements.start * size_of::<T>()..elements.end * size_of::<T>();
            let length_bytes = (bytes.end - bytes.start).next_multiple_of(PAGE_BYTES);
            self.memory.release(bytes.start, length_bytes).is_ok()
        }

        /// The first element's address.
        #[inline(always)]
        pub(crate) fn as_ptr(&self) -> *const T {
            self.memory.as_ptr().cast()
        }
    }
}

#[cfg(all(test, loom))]
pub(crate) use model::ReservedArray;
#[cfg(all(test, loom))]
mod model {
    use super::ZeroValid;

    /// See the head of the file.
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
        /// `index` must be below `len` (checked all the same).
        pub(crate) unsafe fn get_unchecked(&self, index: usize) -> &T {
            &self.0[index]
        }

        pub(crate) fn as_ptr(&self) -> *const T {
            self.0.as_ptr()
        }
    }
}

//! The checks at the boundary: pointers, structs of other versions, ranges, panics.
//!
//! Called by every exported function. A [`Failure`] is a misuse that was found here, or an error of
//! the library; [`guard`] turns it into a result code and keeps its text for the calling thread.
//!
//! # Safety
//! Reads and writes through pointers of the caller, under the contract of the crate's head.
#![allow(unsafe_code)]

use crate::result::{self, bifolio_result};
use bifolio::{Error, File};
use std::ffi::{CStr, OsStr, c_char};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// The reason why a call fails.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A pointer that must not be null, by the name of its parameter.
    Null(&'static str),
    /// Another misuse.
    Misuse(String),
    /// A change without an LSN of a file with a write gate, or the other way round.
    GateMisuse(&'static str),
    /// A handle that other objects still refer to.
    InUse(String),
    /// An error of the library.
    Library(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

/// Runs the body of an exported function. A panic ends here: no unwinding reaches C.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> bifolio_result {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => bifolio_result::BIFOLIO_OK,
        Ok(Err(failure)) => result::remember(&failure),
        Err(payload) => result::remember_panic(payload.as_ref()),
    }
}

/// A handle, if it is not null.
///
/// # Safety
/// A pointer that is not null is a live `T` that is changed through shared references only.
pub(crate) unsafe fn handle<'a, T>(
    pointer: *const T,
    name: &'static str,
) -> Result<&'a T, Failure> {
    // SAFETY: null, or live, by the contract of this function.
    unsafe { pointer.as_ref() }.ok_or(Failure::Null(name))
}

/// An output that is written on success only.
pub(crate) struct Output<T>(*mut T);

impl<T> Output<T> {
    /// Checks that an output is not null.
    pub(crate) fn new(pointer: *mut T, name: &'static str) -> Result<Self, Failure> {
        if pointer.is_null() { Err(Failure::Null(name)) } else { Ok(Self(pointer)) }
    }

    /// Writes the output.
    ///
    /// # Safety
    /// The pointer that was given to [`Self::new`] can be written.
    pub(crate) unsafe fn set(self, value: T) {
        // SAFETY: not null, and can be written, by the contract of this function.
        unsafe { self.0.write(value) }
    }
}

/// Text of the caller.
///
/// # Safety
/// A pointer that is not null points to bytes that end with a zero byte.
pub(crate) unsafe fn text<'a>(
    pointer: *const c_char,
    name: &'static str,
) -> Result<&'a CStr, Failure> {
    if pointer.is_null() {
        return Err(Failure::Null(name));
    }
    // SAFETY: not null, and ends with a zero byte, by the contract of this function.
    Ok(unsafe { CStr::from_ptr(pointer) })
}

/// A path of the caller.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn path<'a>(
    pointer: *const c_char,
    name: &'static str,
) -> Result<&'a Path, Failure> {
    // SAFETY: the same contract.
    let text = unsafe { text(pointer, name)? };
    Ok(Path::new(OsStr::from_bytes(text.to_bytes())))
}

/// Bytes of the caller to be read. Null is allowed for no bytes.
///
/// # Safety
/// A pointer that is not null points to `length` bytes that no thread writes while the slice lives.
pub(crate) unsafe fn bytes<'a>(
    pointer: *const std::ffi::c_void,
    length: usize,
    name: &'static str,
) -> Result<&'a [u8], Failure> {
    check_buffer(pointer.cast(), length, name)?;
    if length == 0 {
        return Ok(&[]);
    }
    // SAFETY: not null, of a length that was checked, and readable by the contract.
    Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), length) })
}

/// Bytes of the caller to be written. Null is allowed for no bytes.
///
/// # Safety
/// A pointer that is not null points to `length` bytes that no other code uses while the slice
/// lives.
pub(crate) unsafe fn bytes_mut<'a>(
    pointer: *mut std::ffi::c_void,
    length: usize,
    name: &'static str,
) -> Result<&'a mut [u8], Failure> {
    check_buffer(pointer.cast(), length, name)?;
    if length == 0 {
        return Ok(&mut []);
    }
    // SAFETY: not null, of a length that was checked, and the caller's alone by the contract.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), length) })
}

fn check_buffer(pointer: *const u8, length: usize, name: &'static str) -> Result<(), Failure> {
    if pointer.is_null() && length > 0 {
        return Err(Failure::Null(name));
    }
    if isize::try_from(length).is_err() {
        return Err(Failure::Misuse(format!("{name}: {length} bytes are more than an object has")));
    }
    Ok(())
}

/// A struct that begins with its size, which may be one of another version of the header.
///
/// # Safety
/// Implemented for `repr(C)` structs that begin with a `usize`, hold only integers and pointers,
/// and are valid when all bytes are zero.
pub(crate) unsafe trait Versioned: Copy {
    /// The size of the struct in the first version of the header.
    const SIZE_MIN: usize;
}

/// Copies a struct of options. Fields that an older header lacks are zero, which selects the
/// default; fields that a newer header adds must be zero.
///
/// # Safety
/// A pointer that is not null points to as many bytes as the first word of them states.
pub(crate) unsafe fn options<T: Versioned>(
    pointer: *const T,
    name: &'static str,
) -> Result<T, Failure> {
    let mut options = MaybeUninit::<T>::zeroed();
    if pointer.is_null() {
        // SAFETY: all zeros is a value of each `Versioned`, and stands for the defaults.
        return Ok(unsafe { options.assume_init() });
    }
    // SAFETY: the struct begins with its size.
    let size = unsafe { pointer.cast::<usize>().read() };
    check_size::<T>(size, name)?;
    let bytes = pointer.cast::<u8>();
    let known = size.min(size_of::<T>());
    // SAFETY: the caller has `size` bytes there, and changes none of them during the call.
    let all = unsafe { std::slice::from_raw_parts(bytes, size) };
    if let Some(unknown) = all[known..].iter().position(|byte| *byte != 0) {
        let problem = format!(
            "{name}: sets an option that this version of the library does not have, at byte {} of \
             {size}",
            known + unknown
        );
        return Err(Failure::Misuse(problem));
    }
    // SAFETY: `known` bytes are in the caller's struct and in `options`; they do not overlap.
    unsafe { bytes.copy_to_nonoverlapping(options.as_mut_ptr().cast(), known) };
    // SAFETY: integers and pointers, of which each pattern of bits is valid.
    Ok(unsafe { options.assume_init() })
}

/// An output struct that begins with the size that the caller allocated.
pub(crate) struct VersionedOutput<T> {
    pointer: *mut T,
    size: usize,
}

impl<T: Versioned> VersionedOutput<T> {
    /// # Safety
    /// A pointer that is not null points to as many bytes as the first word of them states.
    pub(crate) unsafe fn new(pointer: *mut T, name: &'static str) -> Result<Self, Failure> {
        if pointer.is_null() {
            return Err(Failure::Null(name));
        }
        // SAFETY: the struct begins with its size.
        let size = unsafe { pointer.cast::<usize>().read() };
        check_size::<T>(size, name)?;
        Ok(Self { pointer, size })
    }

    /// Writes the fields that both sides know, and the number of their bytes as the size.
    ///
    /// # Safety
    /// The bytes can be written.
    pub(crate) unsafe fn set(self, value: &T) {
        let known = self.size.min(size_of::<T>());
        let source: *const T = value;
        // SAFETY: `known` bytes are in both, which do not overlap.
        unsafe { source.cast::<u8>().copy_to_nonoverlapping(self.pointer.cast(), known) };
        // SAFETY: the struct begins with its size.
        unsafe { self.pointer.cast::<usize>().write(known) };
    }
}

/// Upper bound on a struct size: a larger value is an uninitialised struct.
const SIZE_MAX: usize = 4096;

fn check_size<T: Versioned>(size: usize, name: &'static str) -> Result<(), Failure> {
    if (T::SIZE_MIN..=SIZE_MAX).contains(&size) {
        return Ok(());
    }
    let problem = format!(
        "{name}: its size is {size}, and no version of the struct has that (this one has {})",
        size_of::<T>()
    );
    Err(Failure::Misuse(problem))
}

/// The length that reaches to the end of the file.
pub const BIFOLIO_TO_END: u64 = u64::MAX;

/// Returns a range of a file. The library refuses ranges past 2^63.
pub(crate) fn range(file: &File, offset: u64, length: u64) -> Range<u64> {
    if length == BIFOLIO_TO_END {
        return offset..file.len().max(offset);
    }
    offset..offset.saturating_add(length)
}

/// Returns the entry of `table` for a number from the caller.
pub(crate) fn choice<T: Copy>(
    number: u32,
    table: &[(u32, T)],
    name: &'static str,
) -> Result<T, Failure> {
    let found = table.iter().find(|(known, _)| *known == number);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let last = table.len().saturating_sub(1);
        Failure::Misuse(format!("{name}: {number} is none of the values 0 to {last}"))
    })
}

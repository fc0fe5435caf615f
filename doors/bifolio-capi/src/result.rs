//! Result codes, and the last error of the calling thread.
//!
//! The numbers are part of the interface: from the first release on none is changed or reused.
//! `code` assigns each error of the library its number; an error that a later version of the
//! library adds is `BIFOLIO_ERROR_OTHER` until it has a number here.
//!
//! # Safety
//! Writes no memory of the caller; exports symbols.
#![allow(unsafe_code)]

use crate::boundary::Failure;
use crate::names;
use bifolio::ErrorKind;
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

/// Result of a call. Numbers are never reused.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum bifolio_result {
    /// Success.
    BIFOLIO_OK = 0,
    /// A bug in the library: it panicked. The state of the handle is unspecified.
    BIFOLIO_ERROR_PANIC = 1,
    /// A pointer that must not be null is null.
    BIFOLIO_ERROR_NULL = 2,
    /// An argument has an invalid value.
    BIFOLIO_ERROR_ARGUMENT = 3,
    /// The handle is in use: pins of it were not released, or maps not freed.
    BIFOLIO_ERROR_IN_USE = 4,
    /// An error that has no number in this version.
    BIFOLIO_ERROR_OTHER = 5,
    /// A setting of the cache or an option of a file is invalid.
    BIFOLIO_ERROR_CONFIG = 10,
    /// The file cannot be opened.
    BIFOLIO_ERROR_OPEN = 11,
    /// The file is not regular, or the kernel does not know its length.
    BIFOLIO_ERROR_NOT_REGULAR = 12,
    /// The storage failed. Nothing that was in the cache is lost.
    BIFOLIO_ERROR_IO = 13,
    /// The swap file cannot be used.
    BIFOLIO_ERROR_SWAP_FILE = 14,
    /// A page of a memory file could not be read back from the swap.
    BIFOLIO_ERROR_SWAP_READ = 15,
    /// The bytes read back from the swap differ from those written there.
    BIFOLIO_ERROR_SWAP_CORRUPT = 16,
    /// A write-out failed, in the call or before it; its pages are still dirty.
    BIFOLIO_ERROR_WRITEBACK = 17,
    /// The storage has shrunk: another program truncated the file.
    BIFOLIO_ERROR_CUT_SHORT = 18,
    /// A range ends past the maximum length of a file, 2^63 - 1 bytes.
    BIFOLIO_ERROR_OUT_OF_RANGE = 19,
    /// A range ends past the end of the file, which this call does not allow.
    BIFOLIO_ERROR_PAST_END = 20,
    /// The file would grow past `len_max_bytes` of its open options, or past what
    /// `bifolio_file_raise_len_max` has made of it.
    BIFOLIO_ERROR_TOO_LONG = 21,
    /// A pin must lie in one folio.
    BIFOLIO_ERROR_PIN_SPANS_FOLIOS = 22,
    /// The file was not opened for reading, or for writing.
    BIFOLIO_ERROR_NOT_OPENED_FOR = 23,
    /// The file, or its file system, does not support the call: it works only or not for mappable
    /// files, or needs direct I/O.
    BIFOLIO_ERROR_UNSUPPORTED = 24,
    /// Files cannot be mapped on this system, or only for reading.
    BIFOLIO_ERROR_CANNOT_MAP = 25,
    /// A page of a map could not be read when it was touched.
    BIFOLIO_ERROR_FAULT = 26,
    /// Maps of files of the cache are in use.
    BIFOLIO_ERROR_MAPS_ALIVE = 27,
    /// Another program, or another cache, has locked the file.
    BIFOLIO_ERROR_LOCKED = 29,
    /// The file is open, and an option of that open excludes one of this one.
    BIFOLIO_ERROR_OPTION_CONFLICT = 30,
    /// The call needs a folio that its own thread has pinned for writing: release the pin first.
    BIFOLIO_ERROR_PINNED_BY_CALLER = 31,
    /// The device of the file refuses writes, and its share of dirty pages is full.
    BIFOLIO_ERROR_UNWRITABLE = 32,
    /// The bound is reached, and nothing can be evicted.
    BIFOLIO_ERROR_FULL = 33,
    /// The bound cannot fall: what is dirty exceeds its share of the new one, and is not written.
    BIFOLIO_ERROR_BOUND_IN_USE = 34,
    /// A folio has the maximum number of references.
    BIFOLIO_ERROR_TOO_MANY_PINS = 35,
    /// The system refused memory or address space.
    BIFOLIO_ERROR_MEMORY = 36,
    /// The system refused a thread.
    BIFOLIO_ERROR_THREAD = 37,
    /// Files could not be made durable: the cache is still open, and nothing is lost.
    BIFOLIO_ERROR_CLOSE = 38,
    /// The kernel refused a call that could be neither undone nor replaced: build another cache.
    BIFOLIO_ERROR_POISONED = 39,
    /// The cache was closed.
    BIFOLIO_ERROR_CLOSED = 40,
    /// A forked child cannot use the cache of its parent.
    BIFOLIO_ERROR_FORKED = 41,
    /// The write gate of the file holds dirty pages back: its function has failed. They stay dirty.
    BIFOLIO_ERROR_GATED = 42,
    /// The file cannot have a write gate, or a handle without one would change it.
    BIFOLIO_ERROR_GATE_MISUSE = 43,
}

use bifolio_result::*;

/// Returns the number of an error of the library.
fn code(kind: ErrorKind) -> bifolio_result {
    match kind {
        ErrorKind::Config => BIFOLIO_ERROR_CONFIG,
        ErrorKind::Open => BIFOLIO_ERROR_OPEN,
        ErrorKind::NotRegular => BIFOLIO_ERROR_NOT_REGULAR,
        ErrorKind::Io => BIFOLIO_ERROR_IO,
        ErrorKind::SwapFile => BIFOLIO_ERROR_SWAP_FILE,
        ErrorKind::SwapRead => BIFOLIO_ERROR_SWAP_READ,
        ErrorKind::SwapCorrupt => BIFOLIO_ERROR_SWAP_CORRUPT,
        ErrorKind::Writeback => BIFOLIO_ERROR_WRITEBACK,
        ErrorKind::CutShort => BIFOLIO_ERROR_CUT_SHORT,
        ErrorKind::OutOfRange => BIFOLIO_ERROR_OUT_OF_RANGE,
        ErrorKind::PastEnd => BIFOLIO_ERROR_PAST_END,
        ErrorKind::TooLong => BIFOLIO_ERROR_TOO_LONG,
        ErrorKind::PinSpansFolios => BIFOLIO_ERROR_PIN_SPANS_FOLIOS,
        ErrorKind::NotOpenedFor => BIFOLIO_ERROR_NOT_OPENED_FOR,
        ErrorKind::Unsupported => BIFOLIO_ERROR_UNSUPPORTED,
        ErrorKind::CannotMap => BIFOLIO_ERROR_CANNOT_MAP,
        ErrorKind::Fault => BIFOLIO_ERROR_FAULT,
        ErrorKind::MapsAlive => BIFOLIO_ERROR_MAPS_ALIVE,
        ErrorKind::Locked => BIFOLIO_ERROR_LOCKED,
        ErrorKind::OptionConflict => BIFOLIO_ERROR_OPTION_CONFLICT,
        ErrorKind::PinnedByCaller => BIFOLIO_ERROR_PINNED_BY_CALLER,
        ErrorKind::Unwritable => BIFOLIO_ERROR_UNWRITABLE,
        ErrorKind::Full => BIFOLIO_ERROR_FULL,
        ErrorKind::BoundInUse => BIFOLIO_ERROR_BOUND_IN_USE,
        ErrorKind::TooManyPins => BIFOLIO_ERROR_TOO_MANY_PINS,
        ErrorKind::Memory => BIFOLIO_ERROR_MEMORY,
        ErrorKind::Thread => BIFOLIO_ERROR_THREAD,
        ErrorKind::Close => BIFOLIO_ERROR_CLOSE,
        ErrorKind::Poisoned => BIFOLIO_ERROR_POISONED,
        ErrorKind::Closed => BIFOLIO_ERROR_CLOSED,
        ErrorKind::Forked => BIFOLIO_ERROR_FORKED,
        ErrorKind::Gated => BIFOLIO_ERROR_GATED,
        ErrorKind::GateMisuse => BIFOLIO_ERROR_GATE_MISUSE,
        _ => BIFOLIO_ERROR_OTHER,
    }
}

/// The last failure of a thread.
struct Last {
    message: CString,
    errno: c_int,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Stores a failure for the calling thread, and returns its number.
pub(crate) fn remember(failure: &Failure) -> bifolio_result {
    let (result, message, errno) = match failure {
        Failure::Null(name) => (BIFOLIO_ERROR_NULL, format!("{name} is a null pointer"), 0),
        Failure::Misuse(problem) => (BIFOLIO_ERROR_ARGUMENT, problem.clone(), 0),
        Failure::GateMisuse(problem) => {
            (BIFOLIO_ERROR_GATE_MISUSE, (*problem).to_owned(), libc::EOPNOTSUPP)
        }
        Failure::InUse(problem) => (BIFOLIO_ERROR_IN_USE, problem.clone(), 0),
        Failure::Library(error) => (code(error.kind()), names::text_of(error), error.errno()),
    };
    keep(message, errno);
    result
}

/// Stores a panic for the calling thread, and returns its number.
pub(crate) fn remember_panic(payload: &(dyn Any + Send)) -> bifolio_result {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    keep(format!("a defect of the library: {}", text.unwrap_or("panic")), 0);
    BIFOLIO_ERROR_PANIC
}

fn keep(message: String, errno: c_int) {
    // A zero byte, as from a name, would end the text early.
    let message = CString::new(message.replace('\0', "?")).unwrap_or_default();
    // Fails in a thread whose storage is gone: it cannot read the text either.
    let _ = LAST.try_with(|last| *last.borrow_mut() = Some(Last { message, errno }));
}

/// Every result with its name.
const NAMES: [(bifolio_result, &CStr); 39] = [
    (BIFOLIO_OK, c"BIFOLIO_OK"),
    (BIFOLIO_ERROR_PANIC, c"BIFOLIO_ERROR_PANIC"),
    (BIFOLIO_ERROR_NULL, c"BIFOLIO_ERROR_NULL"),
    (BIFOLIO_ERROR_ARGUMENT, c"BIFOLIO_ERROR_ARGUMENT"),
    (BIFOLIO_ERROR_IN_USE, c"BIFOLIO_ERROR_IN_USE"),
    (BIFOLIO_ERROR_OTHER, c"BIFOLIO_ERROR_OTHER"),
    (BIFOLIO_ERROR_CONFIG, c"BIFOLIO_ERROR_CONFIG"),
    (BIFOLIO_ERROR_OPEN, c"BIFOLIO_ERROR_OPEN"),
    (BIFOLIO_ERROR_NOT_REGULAR, c"BIFOLIO_ERROR_NOT_REGULAR"),
    (BIFOLIO_ERROR_IO, c"BIFOLIO_ERROR_IO"),
    (BIFOLIO_ERROR_SWAP_FILE, c"BIFOLIO_ERROR_SWAP_FILE"),
    (BIFOLIO_ERROR_SWAP_READ, c"BIFOLIO_ERROR_SWAP_READ"),
    (BIFOLIO_ERROR_SWAP_CORRUPT, c"BIFOLIO_ERROR_SWAP_CORRUPT"),
    (BIFOLIO_ERROR_WRITEBACK, c"BIFOLIO_ERROR_WRITEBACK"),
    (BIFOLIO_ERROR_CUT_SHORT, c"BIFOLIO_ERROR_CUT_SHORT"),
    (BIFOLIO_ERROR_OUT_OF_RANGE, c"BIFOLIO_ERROR_OUT_OF_RANGE"),
    (BIFOLIO_ERROR_PAST_END, c"BIFOLIO_ERROR_PAST_END"),
    (BIFOLIO_ERROR_TOO_LONG, c"BIFOLIO_ERROR_TOO_LONG"),
    (BIFOLIO_ERROR_PIN_SPANS_FOLIOS, c"BIFOLIO_ERROR_PIN_SPANS_FOLIOS"),
    (BIFOLIO_ERROR_NOT_OPENED_FOR, c"BIFOLIO_ERROR_NOT_OPENED_FOR"),
    (BIFOLIO_ERROR_UNSUPPORTED, c"BIFOLIO_ERROR_UNSUPPORTED"),
    (BIFOLIO_ERROR_CANNOT_MAP, c"BIFOLIO_ERROR_CANNOT_MAP"),
    (BIFOLIO_ERROR_FAULT, c"BIFOLIO_ERROR_FAULT"),
    (BIFOLIO_ERROR_MAPS_ALIVE, c"BIFOLIO_ERROR_MAPS_ALIVE"),
    (BIFOLIO_ERROR_LOCKED, c"BIFOLIO_ERROR_LOCKED"),
    (BIFOLIO_ERROR_OPTION_CONFLICT, c"BIFOLIO_ERROR_OPTION_CONFLICT"),
    (BIFOLIO_ERROR_PINNED_BY_CALLER, c"BIFOLIO_ERROR_PINNED_BY_CALLER"),
    (BIFOLIO_ERROR_UNWRITABLE, c"BIFOLIO_ERROR_UNWRITABLE"),
    (BIFOLIO_ERROR_FULL, c"BIFOLIO_ERROR_FULL"),
    (BIFOLIO_ERROR_BOUND_IN_USE, c"BIFOLIO_ERROR_BOUND_IN_USE"),
    (BIFOLIO_ERROR_TOO_MANY_PINS, c"BIFOLIO_ERROR_TOO_MANY_PINS"),
    (BIFOLIO_ERROR_MEMORY, c"BIFOLIO_ERROR_MEMORY"),
    (BIFOLIO_ERROR_THREAD, c"BIFOLIO_ERROR_THREAD"),
    (BIFOLIO_ERROR_CLOSE, c"BIFOLIO_ERROR_CLOSE"),
    (BIFOLIO_ERROR_POISONED, c"BIFOLIO_ERROR_POISONED"),
    (BIFOLIO_ERROR_CLOSED, c"BIFOLIO_ERROR_CLOSED"),
    (BIFOLIO_ERROR_FORKED, c"BIFOLIO_ERROR_FORKED"),
    (BIFOLIO_ERROR_GATED, c"BIFOLIO_ERROR_GATED"),
    (BIFOLIO_ERROR_GATE_MISUSE, c"BIFOLIO_ERROR_GATE_MISUSE"),
];

/// Returns the text of the last call of this thread that failed: what failed, on which file and
/// position, why, and what to do. Empty if none has failed. Valid until the next call of this
/// thread that fails. A successful call does not change it.
///
/// Threads: any. Blocks: never.
#[unsafe(no_mangle)]
pub extern "C" fn bifolio_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.borrow().as_ref().map(|last| last.message.as_ptr()));
    text.ok().flatten().unwrap_or(c"".as_ptr())
}

/// Returns the `errno` of that error: the system's where the system caused it, such as `ENOSPC`,
/// otherwise the one that fits best, such as `ENOMEM` for a full cache. 0 if none has failed, and
/// for a misuse that the library did not see (`BIFOLIO_ERROR_NULL`, `ARGUMENT`, `IN_USE`, `PANIC`).
///
/// Threads: any. Blocks: never.
#[unsafe(no_mangle)]
pub extern "C" fn bifolio_last_errno() -> c_int {
    LAST.try_with(|last| last.borrow().as_ref().map_or(0, |last| last.errno)).unwrap_or(0)
}

/// Returns the name of a result, such as "BIFOLIO_ERROR_FULL"; "unknown result" for other numbers.
/// Valid forever.
///
/// Threads: any. Blocks: never.
#[unsafe(no_mangle)]
pub extern "C" fn bifolio_result_name(result: u32) -> *const c_char {
    let found = NAMES.iter().find(|(known, _)| *known as u32 == result);
    found.map_or(c"unknown result", |(_, name)| name).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boundary::guard;

    #[test]
    fn a_panic_becomes_a_result_with_its_text() {
        let result = guard(|| panic!("planted {}", 7));
        assert_eq!(result, BIFOLIO_ERROR_PANIC);
        // SAFETY: a text of this thread, and no call fails meanwhile.
        let text = unsafe { CStr::from_ptr(bifolio_last_error()) };
        assert_eq!(text.to_str().unwrap(), "a defect of the library: planted 7");
    }

    #[test]
    fn every_result_has_its_name_and_its_own_number() {
        for (at, (result, name)) in NAMES.iter().enumerate() {
            assert_eq!(format!("{result:?}"), name.to_str().unwrap());
            assert!(NAMES[..at].iter().all(|(other, _)| *other as u32 != *result as u32));
        }
    }
}

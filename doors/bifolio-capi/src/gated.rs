//! Write gates: no page of a file reaches the storage before the log record of its changes is
//! durable.
//!
//! A file with a gate is a `bifolio_file` like any other: all calls that do not change it are those
//! of `file`, `pin` and `calls`. Its changes have LSNs, and are here; a change without one is
//! refused, unless through the handle of `bifolio_file_unlogged`.
//!
//! # Safety
//! Dereferences what C hands over, and calls functions of the caller, under the contract of the
//! crate's head.
#![allow(unsafe_code)]

use crate::boundary::{Failure, Output, bytes, guard, handle, range};
use crate::cache::{bifolio_cache, bifolio_open_options, open_options, open_with};
use crate::file::bifolio_file;
use crate::pin::{AnyPinMut, bifolio_write_pin, pin_mut_of};
use crate::result::bifolio_result;
use bifolio::{Cache, Checkpoint, GatedFile, WriteGate};
use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::sync::Arc;

/// The log of a file with a write gate: functions that the cache calls on any thread, several at
/// once, until the file is closed by its last handle and everything of it is durable. They must not
/// use the gated file, nor throw (declare them `noexcept`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_gate {
    /// Returns the LSN up to which the log is durable: records with that LSN or a lower one. Must
    /// not block.
    pub durable_lsn: Option<unsafe extern "C" fn(context: *mut c_void) -> u64>,
    /// Makes the log durable up to `lsn`, and returns 0, or an `errno`. May block.
    pub make_durable: Option<unsafe extern "C" fn(lsn: u64, context: *mut c_void) -> c_int>,
    /// Passed to both.
    pub context: *mut c_void,
}

/// The gate of a file.
struct Gate {
    durable_lsn: unsafe extern "C" fn(*mut c_void) -> u64,
    make_durable: unsafe extern "C" fn(u64, *mut c_void) -> c_int,
    context: *mut c_void,
}

// SAFETY: the caller's functions may be called on any thread, with this context.
unsafe impl Send for Gate {}
// SAFETY: as above, and by several threads at once.
unsafe impl Sync for Gate {}

impl WriteGate for Gate {
    fn durable_lsn(&self) -> u64 {
        // SAFETY: the caller's function and its context.
        unsafe { (self.durable_lsn)(self.context) }
    }

    fn make_durable(&self, lsn: u64) -> io::Result<()> {
        // SAFETY: the caller's function and its context.
        match unsafe { (self.make_durable)(lsn, self.context) } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// The dirty pages of a file at one moment, from `bifolio_file_checkpoint`.
#[derive(Debug)]
pub struct bifolio_checkpoint {
    checkpoint: Checkpoint,
}

/// Opens the regular file at `path` with a write gate: each change has an LSN, and its page stays
/// in memory until the log is durable up to that. All calls that read work as for other files, and
/// syncs and closes make the log durable first. Changes without an LSN (`bifolio_file_write`, ...)
/// fail with `BIFOLIO_ERROR_GATE_MISUSE`, also through other handles of the file.
///
/// Threads: any, at the same time. Blocks: for the file system.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_open_gated(
    cache: *const bifolio_cache,
    path: *const c_char,
    options: *const bifolio_open_options,
    gate: *const bifolio_gate,
    file: *mut *mut bifolio_file,
) -> bifolio_result {
    let open = |cache: &Cache| {
        // SAFETY: null, or text of the caller.
        let path = unsafe { crate::boundary::path(path, "path")? };
        // SAFETY: null, or options that begin with their size.
        let options = unsafe { open_options(options)? };
        // SAFETY: null, or the caller's struct.
        let gate = unsafe { handle(gate, "gate")? };
        let gate = Gate {
            durable_lsn: gate.durable_lsn.ok_or(Failure::Null("durable_lsn"))?,
            make_durable: gate.make_durable.ok_or(Failure::Null("make_durable"))?,
            context: gate.context,
        };
        Ok(cache.open_gated(path, &options, Arc::new(gate))?.into())
    };
    // SAFETY: null, or a live handle and the caller's variable.
    unsafe { open_with(cache, file, open) }
}

/// Runs `body` on a file with a write gate.
///
/// # Safety
/// Null, or a live handle.
unsafe fn with_gated(
    file: *const bifolio_file,
    body: impl FnOnce(&GatedFile) -> Result<(), Failure>,
) -> bifolio_result {
    guard(|| {
        // SAFETY: the contract.
        let gated = unsafe { handle(file, "file")? }.gated();
        body(gated.ok_or_else(|| {
            Failure::GateMisuse("file: it was not opened by bifolio_cache_open_gated")
        })?)
    })
}

/// Writes all `length` bytes of `buffer` at `offset` of a file with a write gate, like
/// `bifolio_file_write`: a change whose log record has `lsn`. The record may be written later, but
/// its LSN is known.
///
/// Threads: any, at the same time. Blocks: for the device, for the rest of a page that is not in
/// memory, and while too much is dirty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_write_logged(
    file: *const bifolio_file,
    offset: u64,
    buffer: *const c_void,
    length: usize,
    lsn: u64,
) -> bifolio_result {
    let write = |file: &GatedFile| {
        // SAFETY: null, or a buffer of `length` bytes that no thread writes.
        let buffer = unsafe { bytes(buffer, length, "buffer")? };
        Ok(file.write_at(buffer, offset, lsn)?)
    };
    // SAFETY: null, or a live handle.
    unsafe { with_gated(file, write) }
}

/// Appends all `length` bytes of `buffer` to a file with a write gate, like `bifolio_file_append`:
/// a change whose log record has `lsn`. `offset` gets the position of the first byte; it may be
/// null.
///
/// Threads: any, at the same time. Blocks: as `bifolio_file_write_logged`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_append_logged(
    file: *const bifolio_file,
    buffer: *const c_void,
    length: usize,
    lsn: u64,
    offset: *mut u64,
) -> bifolio_result {
    let append = |file: &GatedFile| {
        // SAFETY: null, or a buffer of `length` bytes that no thread writes.
        let buffer = unsafe { bytes(buffer, length, "buffer")? };
        let position = file.append(buffer, lsn)?;
        if let Ok(output) = Output::new(offset, "offset") {
            // SAFETY: the caller's variable.
            unsafe { output.set(position) };
        }
        Ok(())
    };
    // SAFETY: null, or a live handle.
    unsafe { with_gated(file, append) }
}

/// Says that the changes through a pin have a log record with `lsn`; 0 if they need none. To be
/// called before the release of each pin for writing of a file with a write gate: the page of one
/// that is released without an LSN counts as not committed, and stays in memory until
/// `bifolio_file_assign_lsn`.
///
/// Threads: the one that took the pin. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_write_pin_assign_lsn(
    pin: *mut bifolio_write_pin,
    lsn: u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or the caller's struct, which is zero or holds a pin.
        match unsafe { pin_mut_of(pin)? } {
            AnyPinMut::Gated(pin) => pin.assign_lsn(lsn),
            AnyPinMut::Plain(_) => {
                let problem = "pin: its file was not opened by bifolio_cache_open_gated";
                return Err(Failure::GateMisuse(problem));
            }
        }
        Ok(())
    })
}

/// Gives changes that have no LSN yet, of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end)
/// of a file with a write gate, the one of their log record.
///
/// Threads: any, at the same time. Blocks: for folio locks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_assign_lsn(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
    lsn: u64,
) -> bifolio_result {
    let assign =
        |file: &GatedFile| Ok(file.assign_lsn(range(file.unlogged(), offset, length), lsn)?);
    // SAFETY: null, or a live handle.
    unsafe { with_gated(file, assign) }
}

/// Returns the lowest LSN of a change that is not on the storage: the log before it is not needed
/// any more. 0 if there is none, and for a file without a write gate.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_oldest_dirty_lsn(file: *const bifolio_file) -> u64 {
    // SAFETY: null, or a live handle.
    let gated = unsafe { file.as_ref() }.and_then(bifolio_file::gated);
    gated.and_then(GatedFile::oldest_dirty_lsn).unwrap_or(0)
}

/// Opens another handle of a file with a write gate, for changes without a log record
/// (`bifolio_file_write`, `bifolio_file_set_len`, ...). They may reach the storage before any log
/// record.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_unlogged(
    file: *const bifolio_file,
    unlogged: *mut *mut bifolio_file,
) -> bifolio_result {
    let open = |file: &GatedFile| {
        let output = Output::new(unlogged, "unlogged")?;
        let opened = bifolio_file::from(file.unlogged().clone()).into_raw();
        // SAFETY: the caller's variable.
        unsafe { output.set(opened) };
        Ok(())
    };
    // SAFETY: null, or a live handle.
    unsafe { with_gated(file, open) }
}

/// Remembers what is dirty now, for `bifolio_checkpoint_sync`.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_checkpoint(
    file: *const bifolio_file,
    checkpoint: *mut *mut bifolio_checkpoint,
) -> bifolio_result {
    guard(|| {
        let output = Output::new(checkpoint, "checkpoint")?;
        // SAFETY: null, or a live handle.
        let checkpoint = unsafe { handle(file, "file")? }.file().checkpoint()?;
        // SAFETY: the caller's variable.
        unsafe { output.set(Box::into_raw(Box::new(bifolio_checkpoint { checkpoint }))) };
        Ok(())
    })
}

/// Makes everything durable that was dirty at the checkpoint.
///
/// Threads: any, at the same time. Blocks: for the log and the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_checkpoint_sync(
    checkpoint: *const bifolio_checkpoint,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        Ok(unsafe { handle(checkpoint, "checkpoint")? }.checkpoint.sync()?)
    })
}

/// Frees a checkpoint, which keeps its file open. Null is allowed.
///
/// Threads: any, while no other call uses it. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_checkpoint_free(checkpoint: *mut bifolio_checkpoint) {
    guard(|| {
        if !checkpoint.is_null() {
            // SAFETY: made by `bifolio_file_checkpoint`, and no other call uses it.
            drop(unsafe { Box::from_raw(checkpoint) });
        }
        Ok(())
    });
}

//! A file: reads, writes, its length, syncs, advice, closing it.
//!
//! # Safety
//! Dereferences what C hands over, under the contract of the crate's head.
#![allow(unsafe_code)]

use crate::boundary::{Failure, Output, bytes, bytes_mut, choice, guard, handle, range};
use crate::pin::PinCount;
use crate::result::{self, bifolio_result};
use bifolio::{Advice, File, Outcome, ReadRequest};
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

/// A file that is open in a cache.
#[derive(Debug)]
pub struct bifolio_file {
    file: File,
    /// Held while an append is placed and written.
    appending: Mutex<()>,
    /// Pins that borrow `file`.
    pub(crate) pins: PinCount,
}

impl bifolio_file {
    pub(crate) fn into_raw(file: File) -> *mut Self {
        let pins = PinCount::default();
        Box::into_raw(Box::new(Self { file, appending: Mutex::new(()), pins }))
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    fn check_unpinned(&self) -> Result<(), Failure> {
        match self.pins.total() {
            0 => Ok(()),
            pins => Err(Failure::InUse(format!("file: {pins} pins of it were not released"))),
        }
    }
}

/// The use that a file, or a range of it, is about to have.
#[repr(u32)]
#[derive(Clone, Copy, Debug)]
pub enum bifolio_advice {
    /// For the handle: reads are watched, and sequential or strided ones read ahead. The default.
    BIFOLIO_ADVICE_NORMAL = 0,
    /// For the handle: reads are sequential.
    BIFOLIO_ADVICE_SEQUENTIAL = 1,
    /// For the handle: reads have no order; nothing is read ahead.
    BIFOLIO_ADVICE_RANDOM = 2,
    /// For the handle: what is read will not be read again.
    BIFOLIO_ADVICE_NO_REUSE = 3,
    /// For the range: it will be read soon; reading it starts now.
    BIFOLIO_ADVICE_WILL_NEED = 4,
    /// For the range: it will not be needed soon, and goes first when memory is wanted.
    BIFOLIO_ADVICE_COLD = 5,
    /// For the range: it will not be needed; what is clean is evicted now.
    BIFOLIO_ADVICE_DONT_NEED = 6,
    /// For the range: it is read now, before the call returns.
    BIFOLIO_ADVICE_POPULATE_READ = 7,
    /// As `BIFOLIO_ADVICE_POPULATE_READ`; in a file with a map for writing, stores raise no fault
    /// then.
    BIFOLIO_ADVICE_POPULATE_WRITE = 8,
}

pub(crate) fn advice_of(number: u32) -> Result<Advice, Failure> {
    use bifolio_advice::*;
    let table = [
        (BIFOLIO_ADVICE_NORMAL as u32, Advice::Normal),
        (BIFOLIO_ADVICE_SEQUENTIAL as u32, Advice::Sequential),
        (BIFOLIO_ADVICE_RANDOM as u32, Advice::Random),
        (BIFOLIO_ADVICE_NO_REUSE as u32, Advice::NoReuse),
        (BIFOLIO_ADVICE_WILL_NEED as u32, Advice::WillNeed),
        (BIFOLIO_ADVICE_COLD as u32, Advice::Cold),
        (BIFOLIO_ADVICE_DONT_NEED as u32, Advice::DontNeed),
        (BIFOLIO_ADVICE_POPULATE_READ as u32, Advice::PopulateRead),
        (BIFOLIO_ADVICE_POPULATE_WRITE as u32, Advice::PopulateWrite),
    ];
    choice(number, &table, "advice")
}

/// The effect of advice to evict, in folios; all zero for other advice.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_outcome {
    /// Folios that were evicted.
    pub evicted: u64,
    /// Folios that stay: dirty, pinned, mapped, or in use by another call.
    pub remaining: u64,
    /// Of those, the dirty ones; their write-out was started.
    pub remaining_dirty: u64,
    /// Of those, folios that pins or other calls refer to.
    pub remaining_referenced: u64,
}

impl bifolio_outcome {
    /// # Safety
    /// Null, or a variable of the caller.
    pub(crate) unsafe fn write(outcome: Outcome, pointer: *mut Self) {
        let value = Self {
            evicted: outcome.evicted,
            remaining: outcome.remaining.total(),
            remaining_dirty: outcome.remaining.dirty,
            remaining_referenced: outcome.remaining.referenced,
        };
        if !pointer.is_null() {
            // SAFETY: the caller's variable.
            unsafe { pointer.write(value) };
        }
    }
}

/// How much of a range is in memory, in pages of 4 KiB.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_residency {
    /// Pages of the range that are in the file.
    pub pages: u64,
    /// Pages that are in memory.
    pub resident: u64,
    /// Pages that are newer in memory than on their device.
    pub dirty: u64,
    /// Pages that are not in memory, but were.
    pub evicted: u64,
}

/// One read of `bifolio_file_read_many`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_read {
    /// Where to read, bytes.
    pub offset: u64,
    /// Where to put the bytes. Buffers of one call must not overlap.
    pub buffer: *mut c_void,
    /// How many bytes to read.
    pub length: usize,
    /// Set by the call, if `result` is `BIFOLIO_OK`: how many bytes were read; fewer than `length`
    /// only at the end of the file.
    pub read: usize,
    /// Set by the call: the answer to this read.
    pub result: bifolio_result,
    /// Set by the call: the system's number behind `result`, or 0.
    pub error_number: c_int,
}

/// Reads `length` bytes at `offset` into `buffer`. `read` says how many there were: fewer only at
/// the end of the file. What is in memory is copied without a lock; a read of one page never sees
/// half of a write.
///
/// Threads: any, at the same time. Blocks: for the device, for what is not in memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_read(
    file: *const bifolio_file,
    offset: u64,
    buffer: *mut c_void,
    length: usize,
    read: *mut usize,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        let output = Output::new(read, "read")?;
        // SAFETY: null, or a buffer of `length` bytes that is the caller's alone.
        let buffer = unsafe { bytes_mut(buffer, length, "buffer")? };
        let count = file.file.read_at(buffer, offset)?;
        // SAFETY: the caller's variable.
        unsafe { output.set(count) };
        Ok(())
    })
}

/// Answers `count` reads: what is in memory at once, the rest by transfers that leave together.
/// Each read has its own `result`, also if others fail. The answer is that of the first read that
/// failed; if the call could not begin (`file` or `reads` null, the file not opened for reading),
/// nothing in `reads` is changed.
///
/// Threads: any, at the same time. Blocks: for the device, until all are answered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_read_many(
    file: *const bifolio_file,
    reads: *mut bifolio_read,
    count: usize,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        if count == 0 {
            return Ok(());
        }
        if reads.is_null() {
            return Err(Failure::Null("reads"));
        }
        if count > isize::MAX as usize / size_of::<bifolio_read>() {
            return Err(Failure::Misuse(format!("count: {count} reads are more than memory has")));
        }
        // SAFETY: not null, and `count` structs that are the caller's alone.
        let reads = unsafe { std::slice::from_raw_parts_mut(reads, count) };
        let mut requests = Vec::with_capacity(count);
        for read in reads.iter() {
            // SAFETY: a buffer of its own, by the caller, which overlaps with no other.
            let buffer = unsafe { bytes_mut(read.buffer, read.length, "buffer")? };
            requests.push(ReadRequest::new(read.offset, buffer));
        }
        file.file.read_many(&mut requests)?;
        let mut first_failure = None;
        for (read, request) in reads.iter_mut().zip(requests) {
            match request.result {
                Ok(count) => {
                    read.read = count;
                    read.result = bifolio_result::BIFOLIO_OK;
                    read.error_number = 0;
                }
                Err(error) => {
                    read.error_number = result::errno(&error);
                    let failure = Failure::Library(error);
                    read.result = result::remember(&failure);
                    first_failure.get_or_insert(failure);
                }
            }
        }
        first_failure.map_or(Ok(()), Err)
    })
}

/// Writes all `length` bytes of `buffer` at `offset`; the file grows if need be. The bytes are in
/// memory then: durable after a sync. On an error a part of them may have been written.
///
/// Threads: any, at the same time. Blocks: for the device, for the rest of a page that is not in
/// memory, and while too much is dirty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_write(
    file: *const bifolio_file,
    offset: u64,
    buffer: *const c_void,
    length: usize,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        // SAFETY: null, or a buffer of `length` bytes that no thread writes.
        let buffer = unsafe { bytes(buffer, length, "buffer")? };
        Ok(file.file.write_all_at(buffer, offset)?)
    })
}

/// Writes all `length` bytes of `buffer` at the end of the file. `offset`, which may be null, says
/// where they are. Appends through one handle never overlap; those through several handles of a
/// file, and writes behind its end, may. On an error the file may have grown by a part of them.
///
/// Threads: any, at the same time. Blocks: as `bifolio_file_write`, and for other appends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_append(
    file: *const bifolio_file,
    buffer: *const c_void,
    length: usize,
    offset: *mut u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        // SAFETY: null, or a buffer of `length` bytes that no thread writes.
        let buffer = unsafe { bytes(buffer, length, "buffer")? };
        let _appending = file.appending.lock().unwrap_or_else(PoisonError::into_inner);
        let end = file.file.len();
        file.file.write_all_at(buffer, end)?;
        if let Ok(output) = Output::new(offset, "offset") {
            // SAFETY: the caller's variable.
            unsafe { output.set(end) };
        }
        Ok(())
    })
}

/// The length of the file, bytes, with everything that was written, synced or not; 0 for null.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_len(file: *const bifolio_file) -> u64 {
    // SAFETY: null, or a live handle.
    unsafe { file.as_ref() }.map_or(0, |file| file.file.len())
}

/// Bytes of a folio of the file: a pin lies in one; 0 for null.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_folio_bytes(file: *const bifolio_file) -> u64 {
    // SAFETY: null, or a live handle.
    unsafe { file.as_ref() }.map_or(0, |file| file.file.folio_bytes())
}

/// Makes the file `len_bytes` long: cuts what is behind, or grows it by zeros.
///
/// Threads: any, at the same time. Blocks: for the device, and for write-outs of the file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_set_len(
    file: *const bifolio_file,
    len_bytes: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    guard(|| Ok(unsafe { handle(file, "file")? }.file.set_len(len_bytes)?))
}

/// Makes durable every write that returned before: writes dirty pages out and flushes the device.
/// Syncs that come together share a flush. A failure, of now or since the last sync of this handle,
/// is told once; the pages stay dirty, and no sync succeeds until they are on the device.
///
/// Threads: any, at the same time. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_sync_data(file: *const bifolio_file) -> bifolio_result {
    // SAFETY: null, or a live handle.
    guard(|| Ok(unsafe { handle(file, "file")? }.file.sync_data()?))
}

/// As `bifolio_file_sync_data`, and the file's metadata too.
///
/// Threads: any, at the same time. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_sync_all(file: *const bifolio_file) -> bifolio_result {
    // SAFETY: null, or a live handle.
    guard(|| Ok(unsafe { handle(file, "file")? }.file.sync_all()?))
}

/// As `bifolio_file_sync_data`, for `length` bytes at `offset` only (`BIFOLIO_TO_END`: to the end).
///
/// Threads: any, at the same time. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_sync_range(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        Ok(file.file.sync_range(range(file, offset, length))?)
    })
}

/// Takes advice, one of `bifolio_advice`, for `length` bytes at `offset` (`BIFOLIO_TO_END`: to the
/// end), or for the handle. `outcome` may be null.
///
/// Threads: any, at the same time. Blocks: for the device with `BIFOLIO_ADVICE_POPULATE_*`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_advise(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
    advice: u32,
    outcome: *mut bifolio_outcome,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        let found = file.file.advise(range(file, offset, length), advice_of(advice)?)?;
        // SAFETY: null, or the caller's variable.
        unsafe { bifolio_outcome::write(found, outcome) };
        Ok(())
    })
}

/// Tells how much of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) is in memory.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_residency(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
    residency: *mut bifolio_residency,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        let output = Output::new(residency, "residency")?;
        let found = file.file.residency(range(file, offset, length))?;
        let (pages, resident, dirty, evicted) =
            (found.pages, found.resident, found.dirty, found.evicted);
        // SAFETY: the caller's variable.
        unsafe { output.set(bifolio_residency { pages, resident, dirty, evicted }) };
        Ok(())
    })
}

/// Makes a hole of `length` bytes at `offset` of a memory file: they read as zeros, and whole
/// folios among them give their memory back. The length stays.
///
/// Threads: any, at the same time. Blocks: for the swap, where a part of a page was swapped out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_punch_hole(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        Ok(file.file.punch_hole(range(file, offset, length))?)
    })
}

/// Reserves memory for `length` bytes at `offset` of a memory file, which grows if need be: later
/// writes there need no more memory.
///
/// Threads: any, at the same time. Blocks: for memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_allocate(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        Ok(file.file.allocate(range(file, offset, length))?)
    })
}

/// Gives up what was written and is not on the storage: the file holds then what the storage holds.
/// For storage that will not take it, where closing would fail for ever. `bytes`, which may be
/// null, says how much it was.
///
/// Threads: any, at the same time. Blocks: for write-outs that are in flight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_discard_dirty(
    file: *const bifolio_file,
    bytes: *mut u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let discarded = unsafe { handle(file, "file")? }.file.discard_dirty()?;
        if let Ok(output) = Output::new(bytes, "bytes") {
            // SAFETY: the caller's variable.
            unsafe { output.set(discarded) };
        }
        Ok(())
    })
}

/// Makes durable what was written to the file, and ends the handle. On an error the handle is as
/// before and nothing is lost: mend the cause and close again, or give up with `bifolio_file_free`.
/// Pins must have been released (`BIFOLIO_ERROR_IN_USE`); maps may live on.
///
/// Threads: any, while no other call uses the handle. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_close(file: *mut bifolio_file) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let open = unsafe { handle(file, "file")? };
        open.check_unpinned()?;
        open.file.clone().close()?;
        // SAFETY: made by `into_raw`, and no other call uses it.
        drop(unsafe { Box::from_raw(file) });
        Ok(())
    })
}

/// Ends a handle without an answer. The last handle of a file makes durable what it can; what it
/// cannot stays in the cache until `bifolio_cache_close`, which tells of it. Null is allowed. With
/// pins that were not released the handle stays, and is never freed.
///
/// Threads: any, while no other call uses the handle. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_free(file: *mut bifolio_file) {
    guard(|| {
        // SAFETY: null, or a live handle.
        let Some(open) = (unsafe { file.as_ref() }) else { return Ok(()) };
        open.check_unpinned()?;
        // SAFETY: made by `into_raw`, and no other call uses it.
        drop(unsafe { Box::from_raw(file) });
        Ok(())
    });
}

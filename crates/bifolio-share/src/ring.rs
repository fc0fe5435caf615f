//! The memory in which a client puts its requests, and the owner its answers.
//!
//! ```text
//!   0      doorbell  a futex: changes when there is something for the owner
//!   64     touched   number of pages that the client has noted as used
//!   4096   slots     64 bytes each: state, call, file, position, length; then the answer
//!   8192   touches   a ring of pages that were read without a mark of use; it overwrites
//!   40960  data      32 KiB for each slot
//! ```
//!
//! How a request is posted, answered and waited for is the protocol RING, whose columns are at the
//! head of `share/slot.rs` of the library, where the model checker runs it. A client thread has a
//! slot to itself ([`Requests`]); so has a worker (`worker.rs`), by a flag in memory of the owner.
//! Whatever a client writes, a worker makes at most one call for each look at a slot, and writes
//! into that slot alone.

use crate::error::{Error, Failure, Result};
use bifolio::sharing::{Gone, SharedArea, SlotWord, Wait};
use rustix::io::Errno;
use rustix::thread::futex;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Requests of a client at a time; more threads wait for one.
pub(crate) const SLOTS: usize = 64;
/// Bytes that one request reads or writes at most: longer calls are several.
pub(crate) const DATA_BYTES: usize = 32 << 10;
/// Pages that are noted as used and that the owner has not seen yet, at most.
pub(crate) const TOUCHES: u64 = 4096;
/// The owner is told of used pages after this many.
const TOUCHES_TOLD: u64 = 64;

const DOORBELL_AT: usize = 0;
const TOUCHED_AT: usize = 64;
const SLOTS_AT: usize = 4096;
const SLOT_BYTES: usize = 64;
const TOUCHES_AT: usize = SLOTS_AT + SLOTS * SLOT_BYTES;
const DATA_AT: usize = TOUCHES_AT + TOUCHES as usize * 8;
pub(crate) const RING_BYTES: usize = DATA_AT + SLOTS * DATA_BYTES;
const _: () = assert!(RING_BYTES.is_multiple_of(4096) && SLOT_BYTES == 8 * WORDS_MAX);

const WORDS_MAX: usize = 8;
/// Words of a slot, behind that of its state.
const CALL: usize = 1;
const FILE: usize = 2;
const POSITION: usize = 3;
const LENGTH: usize = 4;
/// 0 if the call succeeded, otherwise one more than the code of its error.
const STATUS: usize = 5;
/// Result of the call, or the length of the error's text.
const VALUE: usize = 6;
const ERRNO: usize = 7;

/// Calls: the bytes of [`Request::length`] at [`Request::position`], from or to the data.
pub(crate) const READ: u64 = 1;
/// Reads of several places, which the data lists: see [`Part`]. The length is their number.
pub(crate) const READ_MANY: u64 = 2;
/// Pins bytes of one folio. Returns the offset of the first in the frames; the pin has the number
/// that the client has put in the data.
pub(crate) const PIN: u64 = 3;
/// Drops the pin with the number `position`.
pub(crate) const UNPIN: u64 = 4;
pub(crate) const WRITE: u64 = 5;
/// Appends bytes. Returns their position.
pub(crate) const APPEND: u64 = 6;
/// Sets the length of the file to `position`.
pub(crate) const SET_LEN: u64 = 7;
pub(crate) const SYNC_DATA: u64 = 8;
pub(crate) const SYNC_ALL: u64 = 9;

/// A request, as it was copied out of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) call: u64,
    pub(crate) file: u64,
    pub(crate) position: u64,
    pub(crate) length: u64,
}

/// A part of a batch, in the data: the request is its position and length, the answer the number
/// of bytes read and 0, or 1 if the read failed. The bytes follow all parts, each as many as were
/// wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) first: u64,
    pub(crate) second: u64,
}

impl Part {
    pub(crate) const BYTES: usize = 16;

    fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.first.to_le_bytes());
        bytes[8..].copy_from_slice(&self.second.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; Self::BYTES]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        Self { first: u64::from_le_bytes(words[0]), second: u64::from_le_bytes(words[1]) }
    }

    pub(crate) fn encode_all(parts: &[Self]) -> Vec<u8> {
        parts.iter().flat_map(|part| part.encode()).collect()
    }

    pub(crate) fn decode_all(bytes: &[u8]) -> Vec<Self> {
        bytes.as_chunks().0.iter().map(|part| Self::decode(*part)).collect()
    }
}

/// Result of a call: a number, or why it failed.
pub(crate) type Answer = std::result::Result<u64, Failure>;

/// A page of a file in the ring of touches: never 0, so a place that was never written is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touch {
    pub(crate) file: u64,
    pub(crate) page: u64,
}

const TOUCH_PAGE_BITS: u32 = 44;

impl Touch {
    fn pack(self) -> u64 {
        (self.file << TOUCH_PAGE_BITS) | (self.page & ((1 << TOUCH_PAGE_BITS) - 1))
    }

    fn unpack(word: u64) -> Self {
        Self { file: word >> TOUCH_PAGE_BITS, page: word & ((1 << TOUCH_PAGE_BITS) - 1) }
    }
}

/// Numbers of files are below this, and not 0.
pub(crate) const FILES_END: u64 = 1 << (u64::BITS - TOUCH_PAGE_BITS);

/// The memory, as both sides see it.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) area: SharedArea,
}

impl Ring {
    fn futex(&self, slot: usize) -> &AtomicU32 {
        self.area.futex(SLOTS_AT + slot * SLOT_BYTES)
    }

    fn state(&self, slot: usize) -> SlotWord<'_> {
        SlotWord(self.futex(slot))
    }

    fn word(&self, slot: usize, word: usize) -> &AtomicU64 {
        self.area.word(SLOTS_AT + slot * SLOT_BYTES + word * 8)
    }

    pub(crate) fn doorbell(&self) -> &AtomicU32 {
        self.area.futex(DOORBELL_AT)
    }

    /// Tells the owner to look, or a worker that the client is gone.
    pub(crate) fn ring(&self) {
        // Release: pairs with the Acquire in `Worker::run`: what there is to see is seen.
        self.doorbell().fetch_add(1, Ordering::Release);
        wake(self.doorbell(), 1);
    }

    fn data_at(slot: usize) -> usize {
        DATA_AT + slot * DATA_BYTES
    }
}

fn wake(word: &AtomicU32, threads: u32) {
    // Fails for no word that exists.
    let _ = futex::wake(word, futex::Flags::empty(), threads);
}

/// Sleeps while the word has this value. Returns `true` if another thread ended the sleep, `false`
/// if the word had another value at once.
pub(crate) fn sleep_while(word: &AtomicU32, value: u32) -> bool {
    match futex::wait(word, futex::Flags::empty(), value, None) {
        Err(Errno::AGAIN | Errno::INTR) => false,
        Ok(()) => true,
        Err(_) => {
            // A kernel that refuses to wait: the caller looks again, a moment later.
            std::thread::sleep(std::time::Duration::from_millis(1));
            true
        }
    }
}

/// The owner's side of a slot.
impl Ring {
    /// Returns `true` if a slot has a request that no worker has answered.
    pub(crate) fn is_posted(&self, slot: usize) -> bool {
        self.state(slot).is_posted()
    }

    /// Returns the request of a slot, if there is one (RING-W2, W3). Another may be there at the
    /// next call: the client can write at any moment.
    pub(crate) fn posted(&self, slot: usize) -> Option<Request> {
        if !self.is_posted(slot) {
            return None;
        }
        let load = |word| self.word(slot, word).load(Ordering::Relaxed);
        let (call, file) = (load(CALL), load(FILE));
        Some(Request { call, file, position: load(POSITION), length: load(LENGTH) })
    }

    /// Puts bytes that were read into the data of a slot, at most as many as it has.
    pub(crate) fn put_data(&self, slot: usize, bytes: &[u8]) {
        self.area.copy_in(Self::data_at(slot), &bytes[..bytes.len().min(DATA_BYTES)]);
    }

    /// Copies the first bytes of the data of a slot, once; at most as many as it has.
    pub(crate) fn take_data(&self, slot: usize, target: &mut [u8]) {
        let length = target.len().min(DATA_BYTES);
        self.area.copy_out(Self::data_at(slot), &mut target[..length]);
    }

    /// Answers a request (RING-W4, W5).
    pub(crate) fn answer(&self, slot: usize, answer: &Answer) {
        let (status, value, errno) = match answer {
            Ok(value) => (0, *value, 0),
            Err(failure) => {
                let text = failure.text.as_bytes();
                let text = &text[..text.len().min(DATA_BYTES)];
                self.put_data(slot, text);
                (failure.code.saturating_add(1), text.len() as u64, failure.errno)
            }
        };
        for (word, value) in [(STATUS, status), (VALUE, value), (ERRNO, errno)] {
            self.word(slot, word).store(value, Ordering::Relaxed);
        }
        if self.state(slot).answer() {
            wake(self.futex(slot), 1);
        }
    }

    /// Calls `mark` with the pages that were noted since `seen`, which follows; at most
    /// [`TOUCHES`], the latest. Returns `false` if more were noted.
    pub(crate) fn touches_since(&self, seen: &mut u64, mut mark: impl FnMut(Touch)) -> bool {
        // Acquire: pairs with the Release in `Requests::note`. A place whose number is seen before
        // its content has an older page, which is marked twice.
        let touched = self.area.word(TOUCHED_AT).load(Ordering::Acquire);
        let new = touched.wrapping_sub(*seen);
        *seen = touched;
        // The oldest first: reads in order are seen as such.
        for number in (1..=new.min(TOUCHES)).rev() {
            let place = (touched.wrapping_sub(number) % TOUCHES) as usize;
            match self.area.word(TOUCHES_AT + place * 8).load(Ordering::Relaxed) {
                0 => {}
                word => mark(Touch::unpack(word)),
            }
        }
        new <= TOUCHES
    }
}

/// The client's side: slots for its threads.
#[derive(Debug)]
pub(crate) struct Requests {
    ring: Ring,
    free: Mutex<Vec<usize>>,
    freed: Condvar,
}

impl Requests {
    pub(crate) fn open(memory: OwnedFd) -> std::io::Result<Self> {
        let ring = Ring { area: SharedArea::open(memory, RING_BYTES)? };
        // The last is taken first: few threads touch the data of few slots.
        let free = Mutex::new((0..SLOTS).rev().collect());
        Ok(Self { ring, free, freed: Condvar::new() })
    }

    /// Makes a request with these bytes, at most [`DATA_BYTES`]. Fills `target`, if the call
    /// succeeds, with as many bytes of the answer as it has.
    ///
    /// # Errors
    /// Those of the call; the owner's end.
    pub(crate) fn make(&self, request: Request, data: &[u8], target: &mut [u8]) -> Result<u64> {
        debug_assert!(data.len().max(target.len()) <= DATA_BYTES, "longer calls are several");
        let slot = self.take_slot();
        self.ring.put_data(slot.0, data);
        let value = self.call(slot.0, request)?;
        self.ring.take_data(slot.0, target);
        Ok(value)
    }

    /// Reads the first bytes of `target`, at most [`DATA_BYTES`], and returns their number.
    ///
    /// # Errors
    /// As [`Self::make`].
    pub(crate) fn read(&self, file: u64, position: u64, target: &mut [u8]) -> Result<usize> {
        let length = target.len().min(DATA_BYTES);
        let request = Request { call: READ, file, position, length: length as u64 };
        let slot = self.take_slot();
        let value = self.call(slot.0, request)?;
        let count = usize::try_from(value).unwrap_or(usize::MAX).min(length);
        self.ring.take_data(slot.0, &mut target[..count]);
        Ok(count)
    }

    fn call(&self, slot: usize, request: Request) -> Result<u64> {
        let ring = &self.ring;
        let words = [request.call, request.file, request.position, request.length];
        for (word, value) in [CALL, FILE, POSITION, LENGTH].into_iter().zip(words) {
            ring.word(slot, word).store(value, Ordering::Relaxed);
        }
        ring.state(slot).post().map_err(|Gone| Error::owner_gone())?;
        ring.ring();
        self.wait_for_answer(slot)?;
        let load = |word| ring.word(slot, word).load(Ordering::Relaxed);
        let (status, value) = (load(STATUS), load(VALUE));
        let Some(code) = status.checked_sub(1) else { return Ok(value) };
        let mut text = vec![0; usize::try_from(value).unwrap_or(usize::MAX).min(DATA_BYTES)];
        ring.area.copy_out(Ring::data_at(slot), &mut text);
        let text = String::from_utf8_lossy(&text).into_owned();
        Err(Failure { code, errno: load(ERRNO), text }.into_error())
    }

    /// Waits until the state is DONE (RING-C4, C5).
    fn wait_for_answer(&self, slot: usize) -> Result<()> {
        let (state, futex) = (self.ring.state(slot), self.ring.futex(slot));
        loop {
            match state.wait().map_err(|Gone| Error::owner_gone())? {
                Wait::Done => return Ok(()),
                Wait::While(value) => sleep_while(futex, value),
            };
        }
    }

    fn take_slot(&self) -> Slot<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(slot) = free.pop() {
                return Slot(slot, self);
            }
            free = self.freed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Notes that a page was used that has no mark of it. Never waits; the oldest notes are
    /// overwritten.
    #[inline]
    pub(crate) fn note(&self, touch: Touch) {
        let touched = self.ring.area.word(TOUCHED_AT);
        // Relaxed: each thread gets a place of its own.
        let number = touched.fetch_add(1, Ordering::Relaxed);
        let place = (number % TOUCHES) as usize;
        // Relaxed: a place whose content is seen late has an older page, which is marked again.
        self.ring.area.word(TOUCHES_AT + place * 8).store(touch.pack(), Ordering::Relaxed);
        if number % TOUCHES_TOLD == TOUCHES_TOLD - 1 {
            self.ring.ring();
        }
    }

    /// Lets all requests fail, those that wait and those to come: the owner is gone.
    pub(crate) fn give_up(&self) {
        for slot in 0..SLOTS {
            self.ring.state(slot).give_up();
            wake(self.ring.futex(slot), u32::MAX >> 1);
        }
    }
}

/// A slot of the calling thread, until the drop.
struct Slot<'r>(usize, &'r Requests);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.1.ring.state(self.0).release();
        self.1.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
        self.1.freed.notify_one();
    }
}

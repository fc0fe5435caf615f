//! One asynchronous call that is not complete: what it reads, pins or writes, and how far it is.

use super::try_write::{Attempt, Need, Stopped};
use crate::error::{Error, Result};
use crate::file::hit::Hit;
use crate::file::read::Obstacle;
use crate::file::{File, OwnedPageRef, PageRef, WriteHint};
use crate::fill::{Locked, Wait, copy_filled, own_pins};
use crate::inode::Inode;
use crate::page::{PAGE_BYTES, is_in_one_page, pages_of};
use std::mem;
use std::ops::Range;

/// A call that is not complete: it owns its buffer.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) file: File,
    pub(super) position: u64,
    pub(super) work: Work,
    /// Number of bytes that are done, or the error that ended the call.
    pub(super) result: Result<usize>,
    /// Set if the next byte cannot be read: the read ends before it.
    is_cut: bool,
    /// Hint of this call; that of the handle if it has none.
    pub(super) hint: Option<WriteHint>,
    /// Set if the hint of a write was followed.
    pub(super) is_advised: bool,
}

#[derive(Debug)]
pub(super) enum Work {
    Read(Vec<u8>),
    Pin {
        length: usize,
        pin: Option<OwnedPageRef>,
    },
    Write(Vec<u8>),
    /// Its position is known when it is complete.
    Append(Vec<u8>),
    Sync,
}

#[cold]
pub(super) fn polled_again() -> Error {
    Error::config("FileFuture", "it was polled after it was ready")
}

/// Next step of the server for a call.
#[derive(Debug)]
pub(super) enum NextStep {
    Get(Need),
    Pin(Range<u64>),
    /// Writes a piece.
    Write(Range<u64>),
}

impl Pending {
    pub(super) fn new(file: File, position: u64, work: Work) -> Self {
        Self { file, position, work, result: Ok(0), is_cut: false, hint: None, is_advised: false }
    }

    pub(super) fn pin(file: File, range: Range<u64>) -> Self {
        // A range without an end in the address space, or a reversed one, fails when it is checked.
        let length = range.end.saturating_sub(range.start) as usize;
        Self::new(file, range.start, Work::Pin { length, pin: None })
    }

    fn length(&self) -> usize {
        match &self.work {
            Work::Read(buffer) | Work::Write(buffer) | Work::Append(buffer) => buffer.len(),
            Work::Pin { length, .. } => *length,
            Work::Sync => 0,
        }
    }

    fn done(&self) -> usize {
        *self.result.as_ref().unwrap_or(&self.length())
    }

    pub(super) fn next(&self) -> u64 {
        self.position + self.done() as u64
    }

    /// Returns the bytes that are not done.
    pub(super) fn missing(&self) -> Range<u64> {
        self.next()..self.position + self.length() as u64
    }

    /// Returns the bytes that the next step needs in memory: of a write, those of its next page.
    pub(super) fn wanted(&self) -> Range<u64> {
        let missing = self.missing();
        let is_write = matches!(self.work, Work::Write(_));
        if is_write { missing.start..missing.start + 1 } else { missing }
    }

    /// Returns `true` if nothing more will be done. A read in one page is whole after its first
    /// bytes: bytes appended since belong to later writes.
    pub(super) fn is_finished(&self) -> bool {
        let done = self.done();
        match &self.work {
            _ if self.result.is_err() => true,
            Work::Read(buffer) => {
                let is_whole = done > 0 && is_in_one_page(self.position, buffer.len() as u64);
                self.is_cut || is_whole || done == buffer.len()
            }
            Work::Pin { pin, .. } => pin.is_some(),
            Work::Write(buffer) => done == buffer.len(),
            Work::Append(_) | Work::Sync => false,
        }
    }

    /// Ends the call with `error`; a read that has bytes ends before the one that it is about.
    pub(super) fn fail(&mut self, error: Error) {
        if self.done() == 0 || !matches!(self.work, Work::Read(_)) {
            self.result = Err(error);
        }
        self.is_cut = true;
    }

    /// Checks the call on the thread that polls first, and does what can be done without waiting.
    /// Returns what is needed for the rest.
    pub(super) fn begin(&mut self) -> Result<Need> {
        match &mut self.work {
            Work::Read(buffer) => {
                match self.file.hit_path.read(buffer, self.position) {
                    Hit::Done => {
                        self.result = Ok(buffer.len());
                        return Ok(Need::Nothing);
                    }
                    hit => hit.forget(buffer),
                }
                self.begin_read()
            }
            Work::Pin { length, .. } => {
                let range = self.position..self.position.saturating_add(*length as u64);
                let need = self.try_pin(&range)?;
                if need != Need::Nothing {
                    own_pins::check(&self.file.handle.inode, &pages_of(&range))?;
                    self.file.handle.note_read(range);
                }
                Ok(need)
            }
            Work::Write(_) => self.begin_write(),
            Work::Append(buffer) => {
                let (length, start) = (buffer.len() as u64, self.file.len());
                self.file.check_changeable()?;
                let end = self.file.handle.range_end(start, length)?;
                own_pins::check(&self.file.handle.inode, &pages_of(&(start..end.max(start + 1))))?;
                Ok(Need::Thread)
            }
            Work::Sync => {
                self.file.handle.check_sound()?;
                own_pins::check(&self.file.handle.inode, &own_pins::ALL_PAGES)?;
                Ok(Need::Thread)
            }
        }
    }

    /// Checks a read, and copies what is resident of it.
    fn begin_read(&mut self) -> Result<Need> {
        let (handle, position) = (&self.file.handle, self.position);
        handle.check_readable()?;
        let end = handle.range_end(position, self.length() as u64)?;
        let need = self.read_available();
        let done = self.done() as u64;
        if done > 0 {
            self.file.handle.note_read(position..position + done);
        }
        if need != Need::Nothing {
            own_pins::check(&self.file.handle.inode, &pages_of(&(position..end)))?;
        }
        Ok(need)
    }

    /// Checks a write, and makes it as far as nothing is in the way.
    fn begin_write(&mut self) -> Result<Need> {
        let handle = &self.file.handle;
        self.file.check_changeable()?;
        let end = handle.range_end(self.position, self.length() as u64)?;
        handle.check_len(end)?;
        if end > self.file.len() {
            handle.check_growth(end)?;
        }
        if self.is_once() && self.file.has_full_window() {
            own_pins::check(&handle.inode, &pages_of(&self.missing()))?;
            return Ok(Need::Thread);
        }
        loop {
            match self.write_next() {
                Ok(()) => return Ok(Need::Nothing),
                Err(Stopped::Failed(error)) => return Err(error),
                Err(Stopped::By(Need::Retry)) => {}
                Err(Stopped::By(need)) => {
                    own_pins::check(&self.file.handle.inode, &pages_of(&self.missing()))?;
                    return Ok(need);
                }
            }
        }
    }

    /// Copies what is resident of a read. Returns what is needed for the next byte.
    fn read_available(&mut self) -> Need {
        if self.is_finished() {
            return Need::Nothing;
        }
        let (done, at) = (self.done(), self.next());
        let Work::Read(buffer) = &mut self.work else { return Need::Nothing };
        let (copied, obstacle): (usize, Obstacle) =
            self.file.read_available(&mut buffer[done..], at);
        self.result = Ok(done + copied);
        obstacle.into()
    }

    fn try_pin(&mut self, range: &Range<u64>) -> Result<Need> {
        loop {
            match self.file.try_pin(range, Wait::Never).map(PageRef::into_owned) {
                Ok(owned) => {
                    self.keep(owned);
                    return Ok(Need::Nothing);
                }
                Err(Stopped::Failed(error)) => return Err(error),
                Err(Stopped::By(Need::Retry)) => {}
                Err(Stopped::By(need)) => return Ok(need),
            }
        }
    }

    pub(super) fn keep(&mut self, owned: OwnedPageRef) {
        if let Work::Pin { pin, .. } = &mut self.work {
            *pin = Some(owned);
        }
    }

    /// Writes the bytes that are not done, as far as nothing is in the way.
    fn write_next(&mut self) -> Attempt<()> {
        while !self.is_finished() {
            let (file, piece) = (self.file.clone(), self.file.first_piece(self.missing()));
            let target = file.try_lock_target(&piece, Wait::Never)?;
            self.write_piece(|_, position, bytes| target.write(position, bytes))?;
        }
        Ok(())
    }

    /// Does what is possible of a read under the lock of the call. Returns what is to be done next.
    pub(super) fn next_step(&mut self) -> NextStep {
        match self.work {
            _ if self.is_finished() => NextStep::Get(Need::Nothing),
            Work::Read(_) => NextStep::Get(self.read_available()),
            Work::Pin { .. } => NextStep::Pin(self.missing()),
            Work::Write(_) => NextStep::Write(self.file.first_piece(self.missing())),
            Work::Append(_) | Work::Sync => NextStep::Get(Need::Thread),
        }
    }

    /// Writes the next piece of a write, which `write` gets.
    pub(super) fn write_piece(
        &mut self,
        write: impl FnOnce(&File, u64, &[u8]) -> Attempt<()>,
    ) -> Attempt<()> {
        let piece = self.file.first_piece(self.missing());
        let (done, length) = (self.done(), (piece.end - piece.start) as usize);
        let Work::Write(buffer) = &self.work else { return Ok(()) };
        write(&self.file, piece.start, &buffer[done..done + length])?;
        self.result = Ok(done + length);
        Ok(())
    }

    /// Uses a folio that was just filled, before it is unlocked.
    pub(super) fn take(&mut self, inode: &Inode, locked: &Locked<'_>) {
        let (done, next, missing) = (self.done(), self.next(), self.missing());
        let folio_start = locked.lock.index() * PAGE_BYTES;
        let holds_next = (folio_start..folio_start + self.file.folio_bytes()).contains(&next);
        match &mut self.work {
            _ if self.result.is_err() => {}
            Work::Read(buffer) => {
                let copied = copy_filled(inode, locked, &mut buffer[done..], next);
                if copied > 0 {
                    self.result = Ok(done + copied);
                }
            }
            Work::Pin { pin: None, .. } if holds_next => {
                if let Some(pin) = self.file.pin_locked(&missing, locked).map(PageRef::into_owned) {
                    self.keep(pin);
                }
            }
            Work::Write(_) if holds_next => {
                let write = |file: &File, position, bytes: &[u8]| {
                    file.write_to_filled(locked, position, bytes)
                };
                // What stops it is met again by the next attempt.
                if let Err(Stopped::Failed(error)) = self.write_piece(write) {
                    self.fail(error);
                }
            }
            Work::Pin { .. } | Work::Write(_) | Work::Append(_) | Work::Sync => {}
        }
    }

    /// Makes a call that may wait, on a thread of its own. The bytes are taken out first.
    pub(super) fn take_bytes(&mut self) -> Vec<u8> {
        match &mut self.work {
            Work::Append(buffer) | Work::Write(buffer) => mem::take(buffer),
            Work::Read(_) | Work::Pin { .. } | Work::Sync => Vec::new(),
        }
    }

    /// Takes the buffer of a call that is complete.
    pub(super) fn take_buffer(&mut self) -> Result<Vec<u8>> {
        let done = self.take_result()?;
        let is_once = self.is_once() && !self.is_advised;
        match &mut self.work {
            Work::Read(buffer) => {
                buffer.truncate(done);
                Ok(mem::take(buffer))
            }
            Work::Write(buffer) => {
                let buffer = mem::take(buffer);
                if is_once {
                    let bytes = self.position..self.position + done as u64;
                    self.file.advise_written(bytes, false);
                }
                Ok(buffer)
            }
            Work::Append(buffer) => Ok(mem::take(buffer)),
            Work::Pin { .. } | Work::Sync => Ok(Vec::new()),
        }
    }

    /// Takes the pin, of a file of kind `F`.
    pub(super) fn take_pin<F>(&mut self) -> Result<OwnedPageRef<F>> {
        self.take_result()?;
        let Work::Pin { pin, .. } = &mut self.work else { return Err(polled_again()) };
        pin.take().map(OwnedPageRef::of_kind).ok_or_else(polled_again)
    }

    pub(super) fn take_position(&mut self) -> Result<u64> {
        // A thread has made the append, and followed its hint.
        self.take_result().map(|_| self.position)
    }

    pub(super) fn take_nothing(&mut self) -> Result<()> {
        self.take_result().map(drop)
    }

    fn take_result(&mut self) -> Result<usize> {
        mem::replace(&mut self.result, Ok(0))
    }

    /// Returns `true` for a write whose bytes are not used again soon.
    fn is_once(&self) -> bool {
        let of_handle = || self.file.handle.write_hints.is_once();
        self.hint.map_or_else(of_handle, |hint| hint == WriteHint::Once)
    }
}

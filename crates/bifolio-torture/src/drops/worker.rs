//! A worker of scenes of drops: makes rounds of calls, drops most of their futures, and checks what
//! they have left.

use super::{SLOT, SLOTS, Tally, WORKERS, check_same, failed};
use crate::history::Violation;
use bifolio::{File, OwnedPageRef, WriteHint};
use bifolio_testing::{Woken, block_on, fill_bytes};
use fastrand::Rng;
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{mem, thread};

const PAGE: usize = 4096;
/// Calls that a worker makes at once.
const CALLS: usize = 64;
/// Length of a log at which it is emptied, bytes.
const LOG_BYTES_MAX: u64 = 512 << 10;

/// The moment at which a future is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It is polled until it has an output.
    Kept,
    Unpolled,
    /// After the first poll.
    AtOnce,
    /// After so many wake-ups of the worker, with polls between.
    Later(u32),
    /// When its task was woken, without another poll.
    WhenReady,
    Leaked,
}

/// The work of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    ReadMany,
    Pin,
    Write,
    Append,
    Sync,
}

/// The output of a call.
enum Answer {
    Bytes(Vec<u8>),
    Many(Vec<bifolio::Result<Vec<u8>>>),
    Pin(OwnedPageRef),
    Position(u64),
    Nothing,
}

type CallFuture = Pin<Box<dyn Future<Output = bifolio::Result<Answer>> + Send>>;

/// A write of some bytes of a slot.
#[derive(Clone, Debug)]
pub(super) struct Write {
    pub(super) slot: usize,
    pub(super) start: usize,
    pub(super) bytes: Vec<u8>,
}

impl Write {
    /// Changes the model of a slot by the first bytes of this write, as many as were `found`.
    fn take_prefix(&self, model: &mut [u8], found: &[u8]) {
        let length = self.bytes.iter().zip(&found[self.start..]).take_while(|(a, b)| a == b);
        let length = length.count();
        model[self.start..][..length].copy_from_slice(&self.bytes[..length]);
    }
}

struct Call {
    kind: Kind,
    fate: Fate,
    slot: usize,
    /// Range within the slot.
    range: Range<usize>,
    /// Number of the record of an append.
    record: u64,
    written: Vec<u8>,
    future: Option<CallFuture>,
    was_polled: bool,
}

/// A message to the thread that drops futures of a worker.
enum Message {
    /// Drops a future after so many steps.
    Drop(CallFuture, u32),
    /// Answers when all before are dropped.
    Answer(mpsc::Sender<()>),
}

pub(super) struct Worker {
    number: usize,
    random: Rng,
    file: File,
    log: File,
    /// The bytes of the slots.
    pub(super) model: Vec<u8>,
    /// Writes whose futures were leaked: they may be made at any time. Their slots are not used
    /// again.
    pub(super) leaked_writes: Vec<Write>,
    leaks_left: u64,
    records: u64,
    /// Bytes of the log that were checked.
    log_checked: u64,
    dropper: mpsc::Sender<Message>,
    pub(super) tally: Tally,
}

impl Worker {
    pub(super) fn new(
        number: usize,
        random: Rng,
        file: File,
        log: File,
        bytes: &[u8],
        leaks_left: u64,
    ) -> Self {
        let (dropper, messages) = mpsc::channel();
        // Ends with the worker, whose handle of the channel is the last one.
        thread::spawn(move || {
            for message in messages {
                match message {
                    Message::Drop(future, steps) => {
                        (0..steps).for_each(|_| std::hint::spin_loop());
                        drop(future);
                    }
                    Message::Answer(answer) => drop(answer.send(())),
                }
            }
        });
        let mut worker = Self {
            number,
            random,
            file,
            log,
            model: Vec::new(),
            leaked_writes: Vec::new(),
            leaks_left,
            records: 0,
            log_checked: 0,
            dropper,
            tally: Tally::default(),
        };
        worker.model = (0..SLOTS).flat_map(|slot| bytes[worker.range_of(slot)].to_vec()).collect();
        worker
    }

    /// Returns the range of a slot in the file.
    pub(super) fn range_of(&self, slot: usize) -> Range<usize> {
        let start = (slot * WORKERS + self.number) * SLOT;
        start..start + SLOT
    }

    /// Makes some calls at once, drops most of them, and checks what they have left.
    pub(super) fn round(&mut self) -> Result<(), Violation> {
        let is_leaked = |slot: &usize| self.leaked_writes.iter().any(|write| write.slot == *slot);
        let mut slots: Vec<_> = (0..SLOTS).filter(|slot| !is_leaked(slot)).collect();
        self.random.shuffle(&mut slots);
        slots.truncate(CALLS);
        let mut calls: Vec<_> = slots.into_iter().map(|slot| self.begin(slot)).collect();
        self.tally.calls += calls.len() as u64;
        let mut positions = BTreeMap::new();
        self.run(&mut calls, &mut positions)?;
        self.check_writes(&calls)?;
        self.check_log(&calls, &positions)?;
        match self.random.u32(0..16) {
            0 | 1 => drop(self.file.evict(..).map_err(|error| failed("evict", &error))?),
            2 => self.read_slots()?,
            _ => {}
        }
        Ok(())
    }

    fn begin(&mut self, slot: usize) -> Call {
        let random = &mut self.random;
        let kind = match random.u32(0..64) {
            0..16 => Kind::Read,
            16..22 => Kind::ReadMany,
            22..36 => Kind::Pin,
            36..56 => Kind::Write,
            56..63 => Kind::Append,
            _ => Kind::Sync,
        };
        let fate = match random.u32(0..64) {
            0..12 => Fate::Kept,
            12..18 => Fate::Unpolled,
            18..36 => Fate::AtOnce,
            36..52 => Fate::Later(random.u32(0..48)),
            52..63 => Fate::WhenReady,
            _ if self.leaks_left == 0 => Fate::Kept,
            _ => Fate::Leaked,
        };
        let mut start = random.usize(0..SLOT);
        let mut end = start + random.usize(1..=SLOT - start);
        if kind == Kind::Pin {
            end = end.min((start / PAGE + 1) * PAGE);
        } else if kind == Kind::Write && random.u32(0..4) == 0 {
            // Whole pages need no read.
            (start, end) = (start / PAGE * PAGE, end.next_multiple_of(PAGE));
        }
        let range = start..end;
        let at = (self.range_of(slot).start + start) as u64;
        let bytes = at..at + range.len() as u64;
        let mut written = Vec::new();
        let mut record = 0;
        let file = &self.file;
        let future: CallFuture = match kind {
            Kind::Read => answer(file.read_async(vec![0xAA; range.len()], at), Answer::Bytes),
            Kind::ReadMany => answer(file.read_many_async(parts(&bytes)), Answer::Many),
            Kind::Pin => answer(file.pin_async(bytes), Answer::Pin),
            Kind::Write => {
                written = fill_bytes(self.random.u64(..), range.len());
                let future = file.write_async(written.clone(), at);
                let is_once = self.random.u32(0..3) == 0;
                let hint = if is_once { WriteHint::Once } else { WriteHint::Normal };
                answer(future.write_hint(hint), Answer::Bytes)
            }
            Kind::Append => {
                self.records += 1;
                record = self.records;
                written = record_of(record);
                answer(self.log.append_async(written.clone()), Answer::Position)
            }
            Kind::Sync => answer(file.sync_async(), |()| Answer::Nothing),
        };
        let future = Some(future);
        Call { kind, fate, slot, range, record, written, future, was_polled: false }
    }

    /// Polls the calls until each is complete, dropped or leaked. Notes the positions of records.
    fn run(
        &mut self,
        calls: &mut [Call],
        positions: &mut BTreeMap<u64, u64>,
    ) -> Result<(), Violation> {
        let woken = Arc::new(Woken::default());
        for (number, call) in calls.iter_mut().enumerate() {
            if call.fate == Fate::Unpolled {
                self.tally.unpolled += 1;
                self.drop_future(call);
                continue;
            }
            self.poll(call, number, &woken, positions)?;
            match call.fate {
                Fate::AtOnce if call.future.is_some() => {
                    self.tally.pending += 1;
                    self.drop_future(call);
                }
                Fate::Leaked if call.future.is_some() => self.leak(call),
                _ => {}
            }
        }
        let mut events = 0;
        while calls.iter().any(|call| call.future.is_some()) {
            events += 1;
            let numbers = {
                let numbers = woken.numbers.lock().expect("no panic");
                let waited = woken.changed.wait_timeout_while(
                    numbers,
                    Duration::from_micros(200),
                    |numbers| numbers.is_empty(),
                );
                mem::take(&mut *waited.expect("no panic").0)
            };
            for number in numbers {
                let call = &mut calls[number];
                if call.fate == Fate::WhenReady && call.future.is_some() {
                    self.tally.ready += 1;
                    self.drop_future(call);
                } else {
                    self.poll(call, number, &woken, positions)?;
                }
            }
            for (number, call) in calls.iter_mut().enumerate() {
                let Fate::Later(after) = call.fate else { continue };
                if call.future.is_none() {
                    continue;
                }
                if events > after {
                    self.tally.pending += 1;
                    self.drop_future(call);
                } else if self.random.u32(0..16) == 0 {
                    self.poll(call, number, &woken, positions)?;
                }
            }
        }
        // The other thread may be dropping futures yet.
        let (answer, answered) = mpsc::channel();
        let sent = self.dropper.send(Message::Answer(answer));
        sent.ok().and_then(|()| answered.recv().ok()).ok_or_else(|| {
            Violation("a future panicked when it was dropped on another thread".into())
        })
    }

    fn poll(
        &mut self,
        call: &mut Call,
        number: usize,
        woken: &Arc<Woken>,
        positions: &mut BTreeMap<u64, u64>,
    ) -> Result<(), Violation> {
        let Some(future) = &mut call.future else { return Ok(()) };
        let waker = woken.waker_of(number);
        call.was_polled = true;
        let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) else {
            return Ok(());
        };
        call.future = None;
        let output = output.map_err(|error| failed(&format!("{:?}", call.kind), &error))?;
        let place = self.range_of(call.slot).start + call.range.start;
        let model = &mut self.model[call.slot * SLOT..][call.range.clone()];
        match (call.kind, output) {
            (Kind::Read, Answer::Bytes(bytes)) => check_same("read_async", &bytes, model, place),
            (Kind::ReadMany, Answer::Many(answers)) => {
                let answers: bifolio::Result<Vec<_>> = answers.into_iter().collect();
                let bytes = answers.map_err(|error| failed("read_many_async", &error))?.concat();
                check_same("read_many_async", &bytes, model, place)
            }
            (Kind::Pin, Answer::Pin(pin)) => check_same("pin_async", &pin.to_vec(), model, place),
            (Kind::Write, Answer::Bytes(bytes)) => {
                model.copy_from_slice(&call.written);
                check_same("the buffer of write_async", &bytes, &call.written, place)
            }
            (Kind::Append, Answer::Position(position)) => {
                positions.insert(call.record, position);
                Ok(())
            }
            (Kind::Sync, Answer::Nothing) => Ok(()),
            _ => Err(Violation(format!("{:?} has another output", call.kind))),
        }
    }

    /// Drops a future here or on another thread, at once or a little later.
    fn drop_future(&mut self, call: &mut Call) {
        let Some(future) = call.future.take() else { return };
        if self.random.bool() {
            let steps = self.random.u32(0..2000);
            // A thread that has panicked is found at the end of the round.
            drop(self.dropper.send(Message::Drop(future, steps)));
        }
    }

    fn leak(&mut self, call: &mut Call) {
        if self.leaks_left == 0 {
            call.fate = Fate::Kept;
            return;
        }
        mem::forget(call.future.take());
        self.leaks_left -= 1;
        self.tally.leaked += 1;
        if call.kind == Kind::Write {
            let (slot, start, bytes) = (call.slot, call.range.start, call.written.clone());
            self.leaked_writes.push(Write { slot, start, bytes });
        }
    }

    /// Checks that each dropped write has written its first bytes or none, and notes how many.
    fn check_writes(&mut self, calls: &[Call]) -> Result<(), Violation> {
        let is_dropped = |call: &&Call| {
            let is_dropped = !matches!(call.fate, Fate::Kept | Fate::Leaked);
            call.kind == Kind::Write && is_dropped && call.was_polled
        };
        if !calls.iter().any(|call| is_dropped(&call)) {
            return Ok(());
        }
        // A thread may make writes with `WriteHint::Once` that were dropped, before this one.
        let settled = block_on(self.file.append_async(Vec::new()));
        settled.map_err(|error| failed("an empty append", &error))?;
        for call in calls.iter().filter(is_dropped) {
            let place = self.range_of(call.slot).start;
            let mut found = vec![0; SLOT];
            let read = self.file.read_exact_at(&mut found, place as u64);
            read.map_err(|error| failed("a read", &error))?;
            let model = &mut self.model[call.slot * SLOT..][..SLOT];
            let (slot, start, bytes) = (call.slot, call.range.start, call.written.clone());
            Write { slot, start, bytes }.take_prefix(model, &found);
            check_same("a slot after a dropped write", &found, model, place)?;
        }
        Ok(())
    }

    /// Checks the log: records of dropped appends are whole, and those of others where they were
    /// put.
    fn check_log(
        &mut self,
        calls: &[Call],
        positions: &BTreeMap<u64, u64>,
    ) -> Result<(), Violation> {
        let settled = block_on(self.log.append_async(Vec::new()));
        let end = settled.map_err(|error| failed("an empty append", &error))?;
        let mut found = vec![0; (end - self.log_checked) as usize];
        let read = self.log.read_exact_at(&mut found, self.log_checked);
        read.map_err(|error| failed("a read of the log", &error))?;
        let (mut at, mut seen) = (0, BTreeMap::new());
        while at < found.len() {
            let number = found.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            let number = u64::from_le_bytes(number.unwrap_or_default());
            let call = calls.iter().find(|call| call.record == number && number > 0);
            let call = call.filter(|call| call.was_polled);
            let place = self.log_checked + at as u64;
            let told = || Violation(format!("record {number} at {place} of the log is unexpected"));
            let call = call.ok_or_else(told)?;
            if seen.last_key_value().is_some_and(|(last, _)| *last >= number) {
                return Err(told());
            }
            let end = (at + call.written.len()).min(found.len());
            check_same("a record of the log", &found[at..end], &call.written, place as usize)?;
            seen.insert(number, place);
            at = end;
        }
        for (record, position) in positions {
            if seen.get(record) != Some(position) {
                let place = seen.get(record);
                return Err(Violation(format!("record {record}: {place:?} instead of {position}")));
            }
        }
        self.log_checked = end;
        if end > LOG_BYTES_MAX {
            self.log.set_len(0).map_err(|error| failed("set_len", &error))?;
            self.log_checked = 0;
        }
        Ok(())
    }

    fn read_slots(&mut self) -> Result<(), Violation> {
        for slot in 0..SLOTS {
            if self.leaked_writes.iter().any(|write| write.slot == slot) {
                continue;
            }
            let range = self.range_of(slot);
            let mut found = vec![0; SLOT];
            let read = self.file.read_exact_at(&mut found, range.start as u64);
            read.map_err(|error| failed("a read", &error))?;
            check_same("a slot", &found, &self.model[slot * SLOT..][..SLOT], range.start)?;
        }
        Ok(())
    }
}

/// Makes the output of a call an `Answer`. The call belongs to the future: its drop drops the call.
fn answer<T: Send + 'static>(
    call: bifolio::FileFuture<T>,
    answer_of: fn(T) -> Answer,
) -> CallFuture {
    Box::pin(async move { call.await.map(answer_of) })
}

/// Returns requests that together read `bytes`.
fn parts(bytes: &Range<u64>) -> Vec<(Vec<u8>, u64)> {
    let part = (bytes.end - bytes.start).div_ceil(5).max(1);
    let starts = (bytes.start..bytes.end).step_by(part as usize);
    starts.map(|at| (vec![0xAA; (bytes.end - at).min(part) as usize], at)).collect()
}

/// Returns the bytes of a record: its number, then others.
fn record_of(number: u64) -> Vec<u8> {
    let length = 8 + (number.wrapping_mul(0x9E37_79B9) % 6000) as usize;
    let mut record = fill_bytes(number, length);
    record[..8].copy_from_slice(&number.to_le_bytes());
    record
}

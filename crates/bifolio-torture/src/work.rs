//! The work of a thread: operations of the public API, each judged by the history.

use crate::device::Device;
use crate::history::{Kind, Violation, WORD_BYTES};
use crate::maps::HeldPin;
use crate::scene::{Scene, Target};
use crate::watchdog;
use bifolio::backing::Backing;
use bifolio::{ErrorKind, File, ReadRequest, WriteHint};
use fastrand::Rng;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Number of operations.
pub const OPERATIONS: usize = 25;
/// A read, and a change of the storage of a range: a hole half of the time.
pub const READ: usize = 0;
pub const PUNCH: usize = 16;
/// Operations that may be drawn at any time.
pub const FREQUENT: usize = 20;
/// Maximum bytes of a call.
const CALL_BYTES_MAX: u64 = 256 << 10;

/// A thread of a scene.
#[derive(Debug)]
pub struct Worker<'s> {
    pub scene: &'s Scene,
    pub number: usize,
    pub random: Rng,
    /// A pin whose map was dropped.
    pub held: Option<HeldPin<'s>>,
    /// Number of the page that another thread accesses in the same moment.
    pub meeting: Option<u64>,
}

pub type Outcome = Result<(), Violation>;

impl<'s> Worker<'s> {
    /// Works until the scene ends.
    pub fn run(&mut self) -> Outcome {
        let total: u32 = self.scene.weights.iter().sum();
        while total > 0 && !self.scene.ends.load(Ordering::Relaxed) {
            let mut drawn = self.random.u32(0..total);
            let mut operation = 0;
            while drawn >= self.scene.weights[operation] {
                drawn -= self.scene.weights[operation];
                operation += 1;
            }
            self.scene.calls.fetch_add(1, Ordering::Relaxed);
            let outcome = self.operate(operation).and_then(|()| self.flit());
            self.scene.clock.end_call(self.number);
            watchdog::progress();
            if self.scene.is_free(self.number) {
                self.scene.free_calls.fetch_add(1, Ordering::Relaxed);
            }
            outcome?;
        }
        self.release_pin()
    }

    fn operate(&mut self, operation: usize) -> Outcome {
        let scene = self.scene;
        let is_free = scene.is_free(self.number);
        let files = if scene.is_greedy(self.number) { 1 } else { scene.targets.len() };
        let target = &scene.targets[self.random.usize(usize::from(is_free)..files)];
        let file = target.handles[self.number].lock().expect("no panic").clone();
        let Some(file) = file else { return self.open(target) };
        if scene.is_greedy(self.number) {
            // A sync would wait for the device at once, and take no more.
            return self.write(target, &file);
        }
        let operation = self.meet(target).unwrap_or(operation);
        match operation {
            READ..=2 => self.read(target, &file),
            3 if self.random.bool() => self.call_async(target, &file),
            3 => self.read_many(target, &file),
            4 => self.pin(target, &file),
            5 if self.random.bool() => self.pin(target, &file),
            5 => self.read_with(target, &file),
            6 => self.pin_many(target, &file),
            7..=9 => self.write(target, &file),
            10 => self.append(target, &file),
            11 => self.pin_mut(target, &file),
            12 => self.sync(target, &file, true),
            13 => self.sync(target, &file, false),
            14 => self.advise(&file),
            15 if scene.has_low_limits() && self.random.bool() => self.raise_len_max(target, &file),
            15 => self.set_len(target, &file),
            PUNCH => self.punch_or_allocate(target, &file),
            // Less memory than a device that hangs keeps cannot be, nor can its files be read.
            17 if scene.has_hung_device() => Ok(()),
            22.. if is_free && operation != 23 => Ok(()),
            17 => self.resize(),
            18 if self.random.u32(0..8) == 0 => self.hold_pin(target, &file),
            18 => self.map(target, &file),
            19 => self.reopen(target, file),
            20 | 21 => self.pins(target, &file),
            22 => self.read_many(target, &file),
            23 => self.seek(target, &file),
            _ => self.evict_all(&file),
        }
    }

    /// Returns a range of whole words of a file, mostly short, often at a page's edge.
    pub fn range(&mut self, target: &Target, bytes_max: u64) -> Range<u64> {
        let most = bytes_max.min(target.len_bytes_max);
        let random = &mut self.random;
        let length = match random.u32(0..8) {
            0..4 => random.u64(1..=64) * WORD_BYTES,
            4..6 => 4096,
            6 => 4096 * random.u64(1..=16),
            _ => random.u64(1..=most / WORD_BYTES) * WORD_BYTES,
        };
        let length = length.min(most);
        let mut start = random.u64(0..=(target.len_bytes_max - length) / WORD_BYTES) * WORD_BYTES;
        // A few hot pages, and whole ones.
        if random.u32(0..3) == 0 {
            start %= 16 << 10;
        }
        if random.bool() {
            start &= !4095;
        }
        // Where another thread is: most of what goes wrong does where two meet.
        if let Some(page) = self.meeting.take() {
            start = (page * 4096).min((target.len_bytes_max - length) / WORD_BYTES * WORD_BYTES);
        } else if random.u32(0..4) == 0 {
            let before = random.u64(0..4) * 4096;
            let met = target.met.load(Ordering::Relaxed).saturating_sub(before);
            start = met.min((target.len_bytes_max - length) / WORD_BYTES * WORD_BYTES);
        } else {
            target.met.store(start, Ordering::Relaxed);
        }
        start..start + length
    }

    fn read(&mut self, target: &Target, file: &File) -> Outcome {
        let range = self.range(target, CALL_BYTES_MAX);
        let mut buffer = vec![0xAA; (range.end - range.start) as usize];
        let certain = target.len_bytes_certain.load(Ordering::Relaxed);
        let begun = self.scene.clock.begin_call(self.number);
        let answer = file.read_at(&mut buffer, range.start);
        let read = match answer {
            Ok(read) => read,
            Err(error) => {
                self.check_unread(target, &buffer, range.start, 0, begun)?;
                return self.refused("read_at", target, &error);
            }
        };
        self.check_unread(target, &buffer, range.start, read, begun)?;
        if !self.scene.has_cuts() && !self.scene.may_fail && range.end <= certain {
            let wanted = buffer.len();
            // A read may end early only at an error, and there is none here.
            if read < wanted {
                return Err(Violation(format!(
                    "read_at of {range:?} read {read} of {wanted} bytes; {certain} exist"
                )));
            }
        }
        let whole = read as u64 / WORD_BYTES * WORD_BYTES;
        target.history.check("read_at", &buffer[..whole as usize], range.start, begun)?;
        // The promise is of reads in one page.
        if range.start / 4096 == (range.end - 1) / 4096 {
            target.history.check_whole(&buffer[..whole as usize], range.start)?;
        }
        Ok(())
    }

    fn read_many(&mut self, target: &Target, file: &File) -> Outcome {
        let count = self.random.usize(1..40);
        let ranges: Vec<_> = (0..count).map(|_| self.range(target, 16 << 10)).collect();
        let mut buffers: Vec<Vec<u8>> =
            ranges.iter().map(|range| vec![0xAA; (range.end - range.start) as usize]).collect();
        let begun = self.scene.clock.begin_call(self.number);
        let starts = ranges.iter().map(|range| range.start);
        let mut requests: Vec<_> = starts
            .zip(&mut buffers)
            .map(|(start, buffer)| ReadRequest::new(buffer, start))
            .collect();
        if let Err(error) = file.read_many(&mut requests) {
            return self.refused("read_many", target, &error);
        }
        for request in requests {
            match request.result {
                Ok(read) => {
                    let whole = read as u64 / WORD_BYTES * WORD_BYTES;
                    let bytes = &request.buffer[..whole as usize];
                    target.history.check("read_many", bytes, request.position, begun)?;
                }
                Err(error) => self.refused("read_many", target, &error)?,
            }
        }
        Ok(())
    }

    /// A range in one folio.
    pub fn folio_range(&mut self, target: &Target, file: &File) -> Range<u64> {
        let range = self.range(target, file.folio_bytes());
        let folio_end = (range.start / file.folio_bytes() + 1) * file.folio_bytes();
        range.start..range.end.min(folio_end)
    }

    fn pin(&mut self, target: &Target, file: &File) -> Outcome {
        let range = self.folio_range(target, file);
        let begun = self.scene.clock.begin_call(self.number);
        match file.pin(range.clone()) {
            Ok(pin) => {
                let mut buffer = vec![0xAA; pin.len()];
                pin.copy_to(0, &mut buffer).unwrap();
                let checked = target.history.check("pin", &buffer, range.start, begun);
                // A pin keeps what was cut off.
                if self.scene.has_cuts() { Ok(()) } else { checked }
            }
            Err(error) => self.refused("pin", target, &error),
        }
    }

    /// Reads in place; the result is that of one moment.
    fn read_with(&mut self, target: &Target, file: &File) -> Outcome {
        let range = self.folio_range(target, file);
        let begun = self.scene.clock.begin_call(self.number);
        let answer = file.read_with(range.clone(), |page| {
            let words = (0..page.len()).step_by(WORD_BYTES as usize);
            words.map_while(|at| page.array(at).map(u64::from_le_bytes)).collect::<Vec<_>>()
        });
        match answer {
            Ok(words) => {
                let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
                target.history.check("read_with", &bytes, range.start, begun)
            }
            Err(error) => self.refused("read_with", target, &error),
        }
    }

    /// Returns the number of pins that a thread may hold: all threads together pin less than an
    /// eighth of what there is.
    pub fn pins_at_once(&self, file: &File) -> u64 {
        let scene = self.scene;
        let most = scene.memory_bytes / (8 * scene.threads as u64 * file.folio_bytes());
        most.clamp(1, 8)
    }

    fn pin_many(&mut self, target: &Target, file: &File) -> Outcome {
        let most = self.pins_at_once(file);
        let count = self.random.u64(1..=most);
        let ranges: Vec<_> = (0..count).map(|_| self.folio_range(target, file)).collect();
        let begun = self.scene.clock.begin_call(self.number);
        for (pin, range) in file.pin_many(&ranges).into_iter().zip(ranges) {
            match pin {
                Ok(pin) => {
                    let mut buffer = vec![0xAA; pin.len()];
                    pin.copy_to(0, &mut buffer).unwrap();
                    let checked = target.history.check("pin_many", &buffer, range.start, begun);
                    if !self.scene.has_cuts() {
                        checked?;
                    }
                }
                Err(error) => self.refused("pin_many", target, &error)?,
            }
        }
        Ok(())
    }

    fn write(&mut self, target: &Target, file: &File) -> Outcome {
        let range = self.range(target, CALL_BYTES_MAX);
        self.write_range("write_at", target, file, range)
    }

    /// Writes at the current end; other threads may do the same.
    fn append(&mut self, target: &Target, file: &File) -> Outcome {
        let start = file.len() / WORD_BYTES * WORD_BYTES;
        let length = self.random.u64(1..=600) * WORD_BYTES;
        let end = (start + length).min(target.len_bytes_max);
        if start >= end {
            return Ok(());
        }
        self.write_range("append", target, file, start..end)
    }

    fn write_range(
        &mut self,
        call: &'static str,
        target: &Target,
        file: &File,
        range: Range<u64>,
    ) -> Outcome {
        self.scene.clock.begin_call(self.number);
        let change = target.history.begin(call, self.number, Kind::Write, range.clone());
        let words = range.start / WORD_BYTES..range.end / WORD_BYTES;
        let bytes: Vec<u8> = words.flat_map(|index| change.word(index).to_le_bytes()).collect();
        if self.random.u32(0..64) == 0 {
            let hints = [WriteHint::Normal, WriteHint::Once];
            file.set_write_hint(hints[usize::from(self.random.bool())]);
        }
        let answer = file.write_at(&bytes, range.start);
        let written = *answer.as_ref().unwrap_or(&0) as u64;
        target.history.end(&change, written);
        target.len_bytes_certain.fetch_max(range.start + written, Ordering::Relaxed);
        target.note_written(range.start..range.start + written / WORD_BYTES * WORD_BYTES);
        match answer {
            Ok(_) => Ok(()),
            Err(error) => self.refused(call, target, &error),
        }
    }

    fn pin_mut(&mut self, target: &Target, file: &File) -> Outcome {
        let range = self.folio_range(target, file);
        self.scene.clock.begin_call(self.number);
        let change = target.history.begin("pin_mut", self.number, Kind::Write, range.clone());
        match file.pin_mut(range.clone()) {
            Ok(mut pin) => {
                let words = range.start / WORD_BYTES..range.end / WORD_BYTES;
                for (offset, index) in words.enumerate() {
                    pin.copy_from(offset * 8, &change.word(index).to_le_bytes()).unwrap();
                }
                let looked = self.look_beside(target, file, range.clone());
                drop(pin);
                target.history.end(&change, range.end - range.start);
                target.note_written(range);
                looked
            }
            Err(error) => {
                target.history.end(&change, 0);
                self.refused("pin_mut", target, &error)
            }
        }
    }

    /// Syncs, and checks what a power cut at this moment would leave.
    fn sync(&mut self, target: &Target, file: &File, whole: bool) -> Outcome {
        let range = if whole { 0..target.len_bytes_max } else { self.range(target, 64 << 10) };
        let begun = self.scene.clock.begin_call(self.number);
        let answer = match (whole, self.random.u32(0..4)) {
            (true, 0) => file.sync_all(),
            (true, _) => file.sync_data(),
            (false, _) => file.sync_range(range.clone()),
        };
        if let Err(error) = answer {
            return self.refused("sync", target, &error);
        }
        self.cut_power("power cut after a sync", target, range, if whole { 16 } else { 4 }, begun)
    }

    /// The durable bytes that a power cut now would leave of some pages.
    pub fn cut_power(
        &mut self,
        what: &str,
        target: &Target,
        range: Range<u64>,
        looks: u32,
        begun: u64,
    ) -> Outcome {
        let Some(device) = &target.device else { return Ok(()) };
        if device.has_unflushed() {
            self.scene.seen.unflushed_cuts.fetch_add(1, Ordering::Relaxed);
        }
        for _ in 0..looks {
            let pages = range.start / 4096..range.end.div_ceil(4096);
            let page = self.random.u64(pages) * 4096;
            let part = page.max(range.start)..(page + 4096).min(range.end);
            let durable = device.durable(part.start, (part.end - part.start) as usize);
            target.history.check(what, &durable, part.start, begun)?;
        }
        // The first and the last word of what was written last: a page that a sync has left out is
        // one of them, and few of those above are.
        let recent = target.recent.lock().expect("no panic").clone();
        for written in recent {
            let part = written.start.max(range.start)..written.end.min(range.end);
            if part.is_empty() {
                continue;
            }
            for word in [part.start, part.end - WORD_BYTES] {
                let durable = device.durable(word, WORD_BYTES as usize);
                target.history.check(what, &durable, word, begun)?;
            }
        }
        Ok(())
    }

    /// Pins ranges one after the other, and keeps each beyond the next.
    fn pins(&mut self, target: &Target, file: &File) -> Outcome {
        let range = self.folio_range(target, file);
        let mut held = None;
        let mut at = range.start;
        let begun = self.scene.clock.begin_call(self.number);
        while at < range.end {
            let folio_end = (at / file.folio_bytes() + 1) * file.folio_bytes();
            let owned = match file.pin(at..folio_end.min(range.end)) {
                Ok(pin) => pin.into_owned(),
                Err(error) => return self.refused("pins", target, &error),
            };
            let mut bytes = vec![0xAA; owned.len()];
            owned.copy_to(0, &mut bytes).unwrap();
            held = Some(owned);
            let whole = bytes.len() / 8 * 8;
            let checked = target.history.check("pins", &bytes[..whole], at, begun);
            at += bytes.len() as u64;
            if !self.scene.has_cuts() {
                checked?;
            }
        }
        drop(held);
        Ok(())
    }

    fn set_len(&mut self, target: &Target, file: &File) -> Outcome {
        if !self.scene.has_cuts() {
            return Ok(());
        }
        let length = self.random.u64(0..=target.len_bytes_max / WORD_BYTES) * WORD_BYTES;
        self.scene.clock.begin_call(self.number);
        let cut = length..target.len_bytes_max.next_multiple_of(4096);
        let change = target.history.begin("set_len", self.number, Kind::Zero, cut.clone());
        let answer = file.set_len(length);
        // Behind the new length there is nothing now.
        target.history.end(&change, if answer.is_ok() { cut.end - cut.start } else { 0 });
        match answer {
            Ok(()) => Ok(()),
            Err(error) => self.refused("set_len", target, &error),
        }
    }

    /// Raises the length that a file of low limits may grow to, in scenes where writes beyond are
    /// refused until then.
    fn raise_len_max(&mut self, target: &Target, file: &File) -> Outcome {
        let bytes = match self.random.u32(0..4) {
            0 => target.len_bytes_max,
            _ => self.random.u64(0..=target.len_bytes_max),
        };
        self.scene.clock.begin_call(self.number);
        match file.raise_len_max(bytes) {
            Ok(()) if file.len_max() >= bytes => Ok(()),
            Ok(()) => Err(Violation(format!("raised to {}, not {bytes}", file.len_max()))),
            Err(error) => self.refused("raise_len_max", target, &error),
        }
    }

    fn punch_or_allocate(&mut self, target: &Target, file: &File) -> Outcome {
        let range = self.range(target, 64 << 10);
        self.scene.clock.begin_call(self.number);
        if self.random.bool() {
            let is_grown = file.is_memory_file();
            let _ = if is_grown { file.allocate(range) } else { file.allocate_keep_len(range) };
            return Ok(());
        }
        let change = target.history.begin("punch_hole", self.number, Kind::Zero, range.clone());
        let answer = match self.random.bool() {
            true => file.zero_range(range.clone()),
            false => file.punch_hole(range.clone()),
        };
        let certain = if answer.is_ok() { range.end - range.start } else { 0 };
        target.history.end(&change, certain);
        match answer {
            Ok(()) => Ok(()),
            Err(error) => self.refused("punch_hole", target, &error),
        }
    }

    fn resize(&mut self) -> Outcome {
        let factor = self.random.u64(4..=16);
        let bytes = (self.scene.memory_bytes * factor / 8).max(256 << 10);
        // It says when the bound cannot be reached.
        let _ = self.scene.cache.set_memory(bytes);
        Ok(())
    }

    /// Drops the thread's handle, or closes it, perhaps for a while: it may be the last one.
    fn reopen(&mut self, target: &Target, file: File) -> Outcome {
        // What is in memory alone goes with its last handle.
        if !self.scene.has_reopens || target.device.is_none() {
            return Ok(());
        }
        drop(target.handles[self.number].lock().expect("no panic").take());
        if self.random.bool() {
            let begun = self.scene.clock.begin_call(self.number);
            match file.close() {
                Ok(()) => {
                    let whole = 0..target.len_bytes_max;
                    self.cut_power("power cut after a close", target, whole, 16, begun)?;
                }
                Err(error) => self.refused("close", target, &error)?,
            }
        } else {
            drop(file);
        }
        if !self.scene.is_fleeting && self.random.bool() { self.open(target) } else { Ok(()) }
    }

    /// Drops a handle, in scenes where this is frequent.
    fn flit(&mut self) -> Outcome {
        if !self.scene.is_fleeting || self.random.u32(0..4) == 0 {
            return Ok(());
        }
        if self.random.bool() {
            // It keeps a handle.
            self.release_pin()?;
        }
        let target = &self.scene.targets[self.random.usize(0..self.scene.targets.len())];
        let file = target.handles[self.number].lock().expect("no panic").clone();
        match file {
            Some(file) => self.reopen(target, file),
            None => Ok(()),
        }
    }

    /// Reopens the thread's handle, perhaps only for reading.
    fn open(&mut self, target: &Target) -> Outcome {
        let (true, Some(device)) = (self.scene.has_reopens, &target.device) else { return Ok(()) };
        let backing: Arc<dyn Backing> = Arc::<Device>::clone(device);
        let options = target.options.clone().write(self.random.u32(0..8) > 0);
        match self.scene.cache.open_backing(backing, &options) {
            Ok(file) => *target.handles[self.number].lock().expect("no panic") = Some(file),
            Err(error) => return self.refused("open", target, &error),
        }
        Ok(())
    }

    /// Returns `true` if an error is allowed.
    pub fn refused(&self, call: &str, target: &Target, error: &bifolio::Error) -> Outcome {
        let is_expected = match error.kind() {
            ErrorKind::PastEnd => self.scene.has_cuts() || call.starts_with("pin"),
            ErrorKind::NotOpenedFor => self.scene.has_reopens,
            ErrorKind::TooLong => self.scene.has_low_limits() && self.scene.has_cuts(),
            _ => false,
        };
        if is_expected {
            return Ok(());
        }
        if self.scene.is_free(self.number) && is_held_up(error) {
            let devices = self.scene.cache.stats().devices;
            let told = format!("{call} waits for a device that hangs: {error}; {devices:?}");
            return Err(Violation(told));
        }
        if self.scene.may_fail {
            target.has_failed.store(true, Ordering::Relaxed);
            return Ok(());
        }
        Err(Violation(format!("{call} failed: {error} ({error:?})")))
    }
}

/// Returns `true` if the error means that the dirty limit was reached and the device was not asked.
fn is_held_up(error: &bifolio::Error) -> bool {
    error.kind() == ErrorKind::Unwritable
        && std::io::Error::from(error.clone()).kind() == std::io::ErrorKind::TimedOut
}

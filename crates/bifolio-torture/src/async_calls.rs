//! Asynchronous calls: many at once by one thread, some of them dropped at a random moment.

use crate::history::{Kind, WORD_BYTES};
use crate::scene::Target;
use crate::work::{Outcome, Worker};
use bifolio::{File, FileFuture, WriteHint};
use bifolio_testing::{block_on, run_all};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Most bytes of one call.
const CALL_BYTES_MAX: u64 = 16 << 10;

impl Worker<'_> {
    /// Makes some calls of one kind at once. Each future is dropped after a poll with a probability
    /// of 1/8.
    pub fn call_async(&mut self, target: &Target, file: &File) -> Outcome {
        match self.random.u32(0..8) {
            0..3 => self.read_async(target, file),
            3 => self.read_many_async(target, file),
            4 => self.pin_async(target, file),
            5..7 => self.write_async(target, file),
            _ => self.sync_async(target, file),
        }
    }

    /// Returns the result of each future that was not dropped, with its number.
    fn run_some<T>(&mut self, futures: Vec<FileFuture<T>>) -> Vec<(usize, bifolio::Result<T>)> {
        let (count, mut answers) = (futures.len() as u64, Vec::new());
        let random = &mut self.random;
        run_all(futures, || random.u32(0..8) == 0, |number, answer| answers.push((number, answer)));
        let dropped = count - answers.len() as u64;
        self.scene.seen.dropped_futures.fetch_add(dropped, Ordering::Relaxed);
        answers
    }

    fn ranges(&mut self, target: &Target) -> Vec<Range<u64>> {
        let count = self.random.usize(1..40);
        (0..count).map(|_| self.range(target, CALL_BYTES_MAX)).collect()
    }

    fn read_async(&mut self, target: &Target, file: &File) -> Outcome {
        let ranges = self.ranges(target);
        let begun = self.scene.clock.begin_call(self.number);
        let read = |range: &Range<u64>| file.read_async(buffer_for(range), range.start);
        for (number, answer) in self.run_some(ranges.iter().map(read).collect()) {
            self.check_read("read_async", target, ranges[number].start, answer, begun)?;
        }
        Ok(())
    }

    fn read_many_async(&mut self, target: &Target, file: &File) -> Outcome {
        let ranges = self.ranges(target);
        let begun = self.scene.clock.begin_call(self.number);
        let requests = ranges.iter().map(|range| (buffer_for(range), range.start));
        for (_, answers) in self.run_some(vec![file.read_many_async(requests)]) {
            let answers = match answers {
                Ok(answers) => answers,
                Err(error) => return self.refused("read_many_async", target, &error),
            };
            for (answer, range) in answers.into_iter().zip(&ranges) {
                self.check_read("read_many_async", target, range.start, answer, begun)?;
            }
        }
        Ok(())
    }

    fn check_read(
        &self,
        call: &str,
        target: &Target,
        start: u64,
        answer: bifolio::Result<Vec<u8>>,
        begun: u64,
    ) -> Outcome {
        match answer {
            Ok(bytes) => {
                let whole = bytes.len() as u64 / WORD_BYTES * WORD_BYTES;
                target.history.check(call, &bytes[..whole as usize], start, begun)
            }
            Err(error) => self.refused(call, target, &error),
        }
    }

    fn pin_async(&mut self, target: &Target, file: &File) -> Outcome {
        let most = self.pins_at_once(file);
        let count = self.random.u64(1..=most);
        let ranges: Vec<_> = (0..count).map(|_| self.folio_range(target, file)).collect();
        let begun = self.scene.clock.begin_call(self.number);
        let pins = ranges.iter().map(|range| file.pin_async(range.clone())).collect();
        for (number, pin) in self.run_some(pins) {
            match pin {
                Ok(pin) => {
                    let start = ranges[number].start;
                    let checked = target.history.check("pin_async", &pin.to_vec(), start, begun);
                    // A pin keeps what was cut off.
                    if !self.scene.has_cuts() {
                        checked?;
                    }
                }
                Err(error) => self.refused("pin_async", target, &error)?,
            }
        }
        Ok(())
    }

    /// A write whose future was dropped may have changed its first words, and changes none after
    /// that.
    fn write_async(&mut self, target: &Target, file: &File) -> Outcome {
        let ranges = self.ranges(target);
        self.scene.clock.begin_call(self.number);
        let begin = |range: &Range<u64>| {
            target.history.begin("write_async", self.number, Kind::Write, range.clone())
        };
        let changes: Vec<_> = ranges.iter().map(begin).collect();
        let write = |(range, change): (&Range<u64>, &std::sync::Arc<crate::history::Change>)| {
            let words = range.start / WORD_BYTES..range.end / WORD_BYTES;
            let bytes = words.flat_map(|index| change.word(index).to_le_bytes()).collect();
            let future = file.write_async(bytes, range.start);
            if range.start % 3 == 0 { future.write_hint(WriteHint::Once) } else { future }
        };
        let writes = ranges.iter().zip(&changes).map(write).collect();
        let answers = self.run_some(writes);
        let mut written = vec![false; ranges.len()];
        answers.iter().for_each(|(number, answer)| written[*number] = answer.is_ok());
        for ((range, change), is_written) in ranges.iter().zip(&changes).zip(&written) {
            target.history.end(change, if *is_written { range.end - range.start } else { 0 });
            if *is_written {
                target.len_bytes_certain.fetch_max(range.end, Ordering::Relaxed);
                target.note_written(range.clone());
            }
        }
        for (_, answer) in answers {
            if let Err(error) = answer {
                self.refused("write_async", target, &error)?;
            }
        }
        Ok(())
    }

    fn sync_async(&mut self, target: &Target, file: &File) -> Outcome {
        let begun = self.scene.clock.begin_call(self.number);
        let mut dropped = file.sync_async();
        if self.random.bool() {
            // Perhaps begun, and dropped at once.
            run_all(vec![&mut dropped], || true, |_, _| {});
        }
        drop(dropped);
        if let Err(error) = block_on(file.sync_async()) {
            return self.refused("sync_async", target, &error);
        }
        let whole = 0..target.len_bytes_max;
        self.cut_power("power cut after an asynchronous sync", target, whole, 16, begun)
    }
}

fn buffer_for(range: &Range<u64>) -> Vec<u8> {
    vec![0xAA; (range.end - range.start) as usize]
}

//! Asynchronous reads: many at once by one thread, some of them dropped.

use crate::history::WORD_BYTES;
use crate::scene::Target;
use crate::work::{Outcome, Worker};
use bifolio::File;
use bifolio_testing::run_all;

impl Worker<'_> {
    /// Reads some ranges at once. Each future is dropped after a poll with a probability of 1/8.
    pub fn read_async(&mut self, target: &Target, file: &File) -> Outcome {
        let count = self.random.usize(1..40);
        let ranges: Vec<_> = (0..count).map(|_| self.range(target, 16 << 10)).collect();
        let begun = self.scene.clock.begin_call(self.number);
        let read = |range: &std::ops::Range<u64>| {
            file.read_async(vec![0xAA; (range.end - range.start) as usize], range.start)
        };
        let mut answers = Vec::new();
        let futures = ranges.iter().map(read).collect();
        let random = &mut self.random;
        run_all(futures, || random.u32(0..8) == 0, |number, answer| answers.push((number, answer)));
        for (number, answer) in answers {
            match answer {
                Ok(bytes) => {
                    let whole = bytes.len() as u64 / WORD_BYTES * WORD_BYTES;
                    let bytes = &bytes[..whole as usize];
                    target.history.check("read_async", bytes, ranges[number].start, begun)?;
                }
                Err(error) => self.refused("read_async", target, &error)?,
            }
        }
        Ok(())
    }
}

//! Looks at a file that are no plain reads: what a failed read leaves, searches for holes, reads
//! with a page locked.

use crate::history::WORD_BYTES;
use crate::scene::Target;
use crate::work::{Outcome, Worker};
use bifolio::File;

/// What buffers hold before a read.
const UNTOUCHED: [u8; 8] = [0xAA; 8];
/// Zeros.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

impl Worker<'_> {
    /// What a read has left of its buffer behind the `read` bytes that it answered: what was there,
    /// zeros, or bytes of the file; not those of another place or file.
    pub fn check_unread(
        &self,
        target: &Target,
        buffer: &[u8],
        position: u64,
        read: usize,
        begun: u64,
    ) -> Outcome {
        let first = read.next_multiple_of(WORD_BYTES as usize).min(buffer.len());
        for (word, at) in buffer[first..].chunks_exact(8).zip((first..).step_by(8)) {
            if word != UNTOUCHED && word != [0; 8] {
                let what = "read_at, behind what it answered,";
                target.history.check(what, word, position + at as u64, begun)?;
            }
        }
        Ok(())
    }

    /// Where a memory file has a hole, it has zeros.
    pub fn seek(&mut self, target: &Target, file: &File) -> Outcome {
        if !file.is_memory_file() {
            return Ok(());
        }
        let position = self.range(target, WORD_BYTES).start;
        let begun = self.scene.clock.begin_call(self.number);
        let (hole, what) = if self.random.bool() {
            // The end of the file is one, too.
            let found = file.seek_hole(position).ok().flatten();
            let page = found.filter(|at| at % 4096 == 0 && at + 4096 <= file.len());
            (page.map(|at| at..at + 4096), "seek_hole")
        } else {
            let found = file.seek_data(position).ok().flatten();
            (found.map(|at| position..at.min(position + ZEROS.len() as u64)), "seek_data")
        };
        let Some(hole) = hole else { return Ok(()) };
        let length = (hole.end - hole.start) / WORD_BYTES * WORD_BYTES;
        target.history.check(what, &ZEROS[..length as usize], hole.start, begun)
    }

    /// Whoever holds a `PinMut` may read pages behind it.
    pub fn look_behind(&mut self, target: &Target, file: &File, end: u64) -> Outcome {
        let start = end.next_multiple_of(file.folio_bytes());
        if self.random.u32(0..4) > 0 || start + 4096 > target.len_bytes_max {
            return Ok(());
        }
        let start = start + self.random.u64(0..4) * 4096;
        let mut buffer = vec![0xAA; 512];
        let begun = self.scene.clock.tick();
        match file.read_at(&mut buffer, start) {
            Ok(read) => {
                let whole = read as u64 / WORD_BYTES * WORD_BYTES;
                target.history.check("read_at", &buffer[..whole as usize], start, begun)
            }
            Err(error) => self.refused("read_at", target, &error),
        }
    }
}

//! Advice: calls whose result cannot be judged, but that race with everything else.

use crate::work::{Outcome, Worker};
use bifolio::{Access, File};

impl Worker<'_> {
    /// Evicts from all files, and asks for the state of a file.
    pub fn evict_all(&mut self, file: &File) -> Outcome {
        self.scene.clock.begin_call(self.number);
        let _ = self.scene.cache.evict_all();
        let _ = file.residency(0..256 << 10);
        Ok(())
    }

    pub fn advise(&mut self, file: &File) -> Outcome {
        let start = self.random.u64(0..1 << 20);
        let length = self.random.u64(0..256 << 10);
        self.scene.clock.begin_call(self.number);
        // It promises nothing that could be judged.
        let range = start..start + length;
        match self.random.u32(0..12) {
            0 => file.set_access(Access::Normal),
            1 => file.set_access(Access::Sequential),
            2 => file.set_access(Access::Random),
            3 => file.set_access(Access::NoReuse),
            4 => drop(file.prefetch(range)),
            // Every other quarter of it, the last first.
            5 => {
                let part = (length / 8).max(1);
                let parts = (0..4).rev().map(|number| start + 2 * number * part);
                drop(file.prefetch_many(parts.map(|start| start..start + part)));
            }
            6 | 7 => drop(file.populate(range)),
            // No other program changes the storage, so what is forgotten comes back as it was, and
            // the length stays.
            8 => drop(file.invalidate(range)),
            9 => drop(file.refresh_len()),
            _ => drop(file.evict(range)),
        }
        let _ = file.residency(start..start + length);
        Ok(())
    }
}

//! Advice: calls whose result cannot be judged, but that race with everything else.

use crate::work::{Outcome, Worker};
use bifolio::{Advice, File};

impl Worker<'_> {
    /// Gives advice for all files, asks for the state of a file, or collapses small folios.
    pub fn advise_all(&mut self, file: &File) -> Outcome {
        self.scene.clock.begin_call(self.number);
        let advice = [Advice::Cold, Advice::DontNeed, Advice::Normal];
        let _ = self.scene.cache.advise_all(self.random.choice(advice).unwrap_or(Advice::Cold));
        let _ = file.residency(0..256 << 10);
        if file.is_memory_file() && self.scene.memory_bytes >= 4 << 20 {
            let bytes = 4 * file.folio_bytes();
            let start = self.random.u64(0..16) * bytes;
            let _ = file.collapse(start..start + bytes);
        }
        Ok(())
    }

    pub fn advise(&mut self, file: &File) -> Outcome {
        let advice = [
            Advice::Normal,
            Advice::Sequential,
            Advice::Random,
            Advice::NoReuse,
            Advice::WillNeed,
            Advice::Cold,
            Advice::DontNeed,
            Advice::DontNeed,
            Advice::PopulateRead,
            Advice::PopulateWrite,
        ];
        let advice = self.random.choice(advice).unwrap_or(Advice::Normal);
        let start = self.random.u64(0..1 << 20);
        let length = self.random.u64(0..256 << 10);
        self.scene.clock.begin_call(self.number);
        // It promises nothing that could be judged.
        let _ = file.advise(start..start + length, advice);
        let _ = file.residency(start..start + length);
        Ok(())
    }
}

//! The bound on memory, and what is used of it: every part is charged before it is touched
//! (FRAMES-1). Under the lock of `arena.rs`.

#[derive(Debug)]
pub(crate) struct Budget {
    pub(super) bound_bytes: u64,
    pub(super) used_bytes: u64,
}

impl Budget {
    pub(super) fn left_bytes(&self) -> u64 {
        self.bound_bytes.saturating_sub(self.used_bytes)
    }

    #[must_use]
    pub(crate) fn try_take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.left_bytes();
        if fits {
            self.used_bytes += bytes;
        }
        fits
    }

    pub(crate) fn give_back(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.used_bytes, "{bytes} of {} charged bytes", self.used_bytes);
        self.used_bytes -= bytes;
    }
}

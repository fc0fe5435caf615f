//! The budget: bytes that may be resident, and bytes that are. Pure arithmetic under the arena's
//! lock.

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) bound_bytes: u64,
    pub(super) used_bytes: u64,
}

impl Budget {
    pub(super) fn new(bound_bytes: u64) -> Self {
        Self { bound_bytes, used_bytes: 0 }
    }

    /// What may still be taken.
    pub(super) fn left_bytes(&self) -> u64 {
        self.bound_bytes.saturating_sub(self.used_bytes)
    }

    /// What must be given back.
    pub(super) fn excess_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.bound_bytes)
    }

    /// Takes `bytes` if they fit.
    #[must_use]
    pub(super) fn try_take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.left_bytes();
        if fits {
            self.used_bytes += bytes;
        }
        fits
    }

    pub(super) fn give_back(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.used_bytes, "{bytes} of {}", self.used_bytes);
        self.used_bytes -= bytes;
    }
}

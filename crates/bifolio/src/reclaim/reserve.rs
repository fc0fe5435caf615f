//! Memory of the program under the bound: charged in small pieces, each as soon as it is free, so
//! that other calls do not take what was freed for a large reservation.

use super::Reclaim;
use crate::config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Ordering;

/// Bytes charged at once: as much as a round frees at least, where no chunk can be emptied.
const PIECE_BYTES: u64 = 32 << 10;

impl Reclaim {
    /// Charges `bytes` of the program's memory. Evicts pages, and waits for others to be written.
    ///
    /// # Errors
    /// Reservations of more than seven eighths of the bound; pages that cannot be evicted. Then
    /// nothing is charged.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<()> {
        let bound_bytes = self.memory.arena.bound_bytes();
        let most_bytes = config::promised_bytes_max(bound_bytes);
        let added = |before: u64| before.checked_add(bytes).filter(|all| *all <= most_bytes);
        // Relaxed, here and below: only a count. It is raised first, so that two calls do not both
        // take what is left.
        let relaxed = Ordering::Relaxed;
        let counted = self.memory.reserved_bytes.fetch_update(relaxed, relaxed, added);
        if let Err(before) = counted {
            let text = format!(
                "{bytes} bytes cannot be reserved beside the {before} that are: at most \
                 {most_bytes} of the bound of {bound_bytes}"
            );
            return Err(Error::new(ErrorKind::Full, text));
        }
        let mut left_bytes = bytes;
        while left_bytes > 0 {
            let piece_bytes = left_bytes.min(PIECE_BYTES);
            if let Err(error) = self.charge(piece_bytes) {
                self.memory.arena.uncharge(bytes - left_bytes);
                self.memory.reserved_bytes.fetch_sub(bytes, Ordering::Relaxed);
                return Err(error);
            }
            left_bytes -= piece_bytes;
        }
        Ok(())
    }

    pub(crate) fn end_reservation(&self, bytes: u64) {
        self.memory.arena.uncharge(bytes);
        self.memory.reserved_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Fails if a bound leaves too little beside what is reserved.
    pub(super) fn check_reserved(&self, bound_bytes: u64) -> Result<()> {
        let reserved_bytes = self.memory.reserved_bytes.load(Ordering::Relaxed);
        if reserved_bytes <= config::promised_bytes_max(bound_bytes) {
            return Ok(());
        }
        let text = format!("the program has reserved {reserved_bytes} bytes (Cache::reserve)");
        Err(Error::new(ErrorKind::Full, text).of_bound(bound_bytes))
    }
}

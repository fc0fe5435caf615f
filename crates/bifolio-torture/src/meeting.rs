//! Meetings: two threads access one page in the same moment, since most of what goes wrong does
//! where two meet, between two of their instructions.
//!
//! A thread invites to a page and waits, spinning, until another thread takes the invitation or
//! its patience ends. Then both go on with their operations, there. In scenes with memory files the
//! second reads, and the first often punches a hole: the slot of a page in the swap then has two
//! takers.

use crate::scene::{Class, Target};
use crate::work::{PUNCH, READ, Worker};
use std::hint;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// One in so many operations invites.
const RATE: u32 = 16;
/// Time that a thread waits for another.
const PATIENCE: Duration = Duration::from_micros(200);

impl Worker<'_> {
    /// Takes the invitation of another thread, or invites one now and then. Returns the operation
    /// to do at the meeting, if it is not the one that was drawn.
    pub fn meet(&mut self, target: &Target) -> Option<usize> {
        let is_memory = self.scene.class == Class::Memory;
        self.meeting = target.invitation.swap(0, Ordering::Relaxed).checked_sub(1);
        if self.meeting.is_some() {
            return is_memory.then_some(READ);
        }
        if self.random.u32(0..RATE) == 0 {
            self.meeting = self.invite(target);
        }
        if self.meeting.is_none() || !is_memory || self.random.bool() {
            return None;
        }
        self.scene.seen.meetings_at_holes.fetch_add(1, Ordering::Relaxed);
        Some(PUNCH)
    }

    /// Invites to a page, and returns its number if another thread came.
    fn invite(&mut self, target: &Target) -> Option<u64> {
        let page = self.random.u64(0..target.len_bytes_max.div_ceil(4096));
        let exchange = |from, to| {
            let orders = (Ordering::Relaxed, Ordering::Relaxed);
            target.invitation.compare_exchange(from, to, orders.0, orders.1).is_ok()
        };
        if !exchange(0, page + 1) {
            return None;
        }
        let begun = Instant::now();
        while target.invitation.load(Ordering::Relaxed) == page + 1 && begun.elapsed() < PATIENCE {
            hint::spin_loop();
        }
        (!exchange(page + 1, 0)).then_some(page)
    }
}

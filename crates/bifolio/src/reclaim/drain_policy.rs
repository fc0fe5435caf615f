//! The ablation of invalidation: drains of all CPUs' batches, as in the kernel without and with the
//! proposal that the head of `invalidate.rs` tells of. For benchmarks only.

use super::Reclaim;
use super::invalidate::Invalidation;
use crate::ablation::DrainPolicy;
use crate::outcome::{Outcome, Remaining};
use crate::writeback::Inode;
use std::ops::Range;

impl Reclaim {
    pub(super) fn invalidate_by_policy(&self, inode: &Inode, range: &Range<u64>) -> Outcome {
        let walk = |may_drain| Invalidation::new(self, inode, range).run(range, may_drain);
        let asks = match self.ablation.modes().drains {
            DrainPolicy::Targeted => return walk(true),
            DrainPolicy::WhenItCanHelp => |remaining: &Remaining| remaining.referenced > 0,
            // What is locked, under write-back or straddling, `find_lock_entries` passes silently.
            DrainPolicy::OnAnyFailure => |remaining: &Remaining| {
                let passed = remaining.locked + remaining.writeback + remaining.straddling;
                remaining.total() > passed
            },
        };
        let first = walk(false);
        if !asks(&first.remaining) {
            return first;
        }
        let cpus_drained = self.memory.lru.drain_all(&self.memory.folios) as u64;
        let second = walk(false);
        Outcome {
            evicted: first.evicted + second.evicted,
            drains_requested: 1,
            cpus_drained,
            second_pass_evicted: second.evicted,
            ..second
        }
    }
}

//! Random operations, swarm style: each run draws its own weights.
//!
//! With fixed weights every run looks alike, and what needs a thousand writes without one sync, or
//! nothing but truncations, never happens. So each kind of operation is off in some runs and
//! dominant in others. Places and lengths are drawn with a liking for what breaks things: edges of
//! pages and folios, one byte to either side, one hot spot, the end of the file.

use std::ops::RangeInclusive;

use fastrand::Rng;

use crate::op::{Advice, FILL_ZEROS};
use crate::{Op, OpKind};
use bifolio::Access;

const PAGE: u64 = 4096;
/// Maximum ranges of one [`Op::ReadMany`].
const READ_MANY_MAX: usize = 6;
/// All kinds of advice, some of them more often.
const ADVICE: [Advice; 9] = [
    Advice::Access(Access::Normal),
    Advice::Access(Access::Sequential),
    Advice::Access(Access::Random),
    Advice::Access(Access::NoReuse),
    Advice::Prefetch,
    Advice::Prefetch,
    Advice::Evict,
    Advice::Evict,
    Advice::Populate,
];

/// Limits of the operations of a workload.
#[derive(Clone, Debug)]
pub struct Limits {
    /// End of all operations.
    pub length_bytes_max: u64,
    /// Maximum length of a transfer.
    pub transfer_bytes_max: usize,
    /// The folio size of the file; its edges are visited more often.
    pub folio_bytes: u64,
    /// The range [`Op::SetMemory`] draws from.
    pub memory_bytes: RangeInclusive<u64>,
    /// The kinds of operations to draw from.
    pub kinds: Vec<OpKind>,
}

/// An endless sequence of operations: one seed, one sequence.
#[derive(Debug)]
pub struct Workload {
    limits: Limits,
    weights: Vec<(OpKind, u32)>,
    hot_position: u64,
    random: Rng,
}

impl Workload {
    /// The sequence that `seed` stands for.
    ///
    /// # Panics
    /// If the limits allow nothing.
    pub fn new(seed: u64, limits: Limits) -> Self {
        assert!(limits.length_bytes_max > 0 && limits.transfer_bytes_max > 0);
        assert!(!limits.kinds.is_empty());
        let mut random = Rng::with_seed(seed);
        let weights = draw_weights(&limits.kinds, &mut random);
        let hot_position = random.u64(..limits.length_bytes_max);
        Self { limits, weights, hot_position, random }
    }

    /// The weights this run has drawn.
    pub fn weights(&self) -> &[(OpKind, u32)] {
        &self.weights
    }

    fn kind(&mut self) -> OpKind {
        let total: u32 = self.weights.iter().map(|(_, weight)| weight).sum();
        let mut drawn = self.random.u32(..total);
        for (kind, weight) in &self.weights {
            match drawn.checked_sub(*weight) {
                Some(rest) => drawn = rest,
                None => return *kind,
            }
        }
        unreachable!("a number below the sum of the weights belongs to one of them")
    }

    fn op(&mut self) -> Op {
        let kind = self.kind();
        let (position_bytes, length) = self.range();
        // Zeros that were written are not a hole.
        let fill = if self.random.u32(..8) == 0 { FILL_ZEROS } else { self.random.u64(..) };
        match kind {
            OpKind::Read => Op::Read { position_bytes, length },
            OpKind::ReadMany => {
                let count = self.random.usize(1..=READ_MANY_MAX);
                Op::ReadMany { ranges: (0..count).map(|_| self.range()).collect() }
            }
            OpKind::Write => Op::Write { position_bytes, length, fill },
            OpKind::Pin => Op::Pin { position_bytes, length },
            OpKind::Hold => Op::Hold { position_bytes, length },
            OpKind::PinMut => Op::PinMut { position_bytes, length, fill },
            OpKind::SetLen => Op::SetLen { length_bytes: self.position() },
            OpKind::SyncData => Op::SyncData,
            OpKind::SyncAll => Op::SyncAll,
            OpKind::SetMemory => {
                Op::SetMemory { bytes: self.random.u64(self.limits.memory_bytes.clone()) }
            }
            OpKind::Allocate => Op::Allocate { position_bytes, length },
            OpKind::PunchHole => Op::PunchHole { position_bytes, length },
            OpKind::SeekData => Op::SeekData { position_bytes },
            OpKind::SeekHole => Op::SeekHole { position_bytes },
            OpKind::SyncRange => Op::SyncRange { position_bytes, length },
            OpKind::Advise => {
                let advice = *self.random.choice(&ADVICE).expect("not empty");
                Op::Advise { position_bytes, length, advice }
            }
            OpKind::PinMany => {
                let count = self.random.usize(1..=READ_MANY_MAX);
                Op::PinMany { ranges: (0..count).map(|_| self.range()).collect() }
            }
            OpKind::MapRead => Op::MapRead { position_bytes, length },
            OpKind::MapWrite => {
                let is_pinned = self.random.u32(..4) == 0;
                Op::MapWrite { position_bytes, length, fill, is_pinned }
            }
        }
    }

    /// Returns a position and a length within the limits.
    fn range(&mut self) -> (u64, usize) {
        let position = self.position().min(self.limits.length_bytes_max - 1);
        let room = self.limits.length_bytes_max - position;
        let most = room.min(self.limits.transfer_bytes_max as u64);
        let length = match self.random.u32(..8) {
            0 => 1,
            1 | 2 => self.random.u64(1..=64),
            3 | 4 => self.random.u64(1..=PAGE + 1),
            5 => PAGE,
            6 => self.random.u64(1..=4 * self.limits.folio_bytes),
            _ => self.random.u64(1..=most),
        };
        (position, length.min(most) as usize)
    }

    fn position(&mut self) -> u64 {
        let max = self.limits.length_bytes_max;
        let anywhere = self.random.u64(..=max);
        let edge = match self.random.u32(..8) {
            0 | 1 => return anywhere,
            2 | 3 => anywhere / PAGE * PAGE,
            4 => anywhere / self.limits.folio_bytes * self.limits.folio_bytes,
            5 | 6 => self.hot_position,
            _ => max,
        };
        // At the edge, or a little to either side of it.
        let side = *self.random.choice(&[0, 0, 1, 7, 64, 512]).expect("not empty");
        let side = if self.random.bool() { edge + side } else { edge.saturating_sub(side) };
        side.min(max)
    }
}

impl Iterator for Workload {
    type Item = Op;

    /// Returns the next operation; never `None`.
    fn next(&mut self) -> Option<Op> {
        Some(self.op())
    }
}

/// Draws a weight for each kind: off, rare, usual or dominant; at least one is on.
fn draw_weights(kinds: &[OpKind], random: &mut Rng) -> Vec<(OpKind, u32)> {
    let mut weights: Vec<_> = kinds
        .iter()
        .map(|kind| (*kind, *random.choice(&[0, 1, 4, 16]).expect("not empty")))
        .collect();
    if weights.iter().all(|(_, weight)| *weight == 0) {
        let chosen = random.usize(..weights.len());
        weights[chosen].1 = 1;
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn limits() -> Limits {
        Limits {
            length_bytes_max: 200_000,
            transfer_bytes_max: 50_000,
            folio_bytes: 16384,
            memory_bytes: 1 << 20..=2 << 20,
            kinds: [
                &OpKind::ANY_FILE[..],
                &OpKind::ALLOCATION,
                &OpKind::EXERCISER,
                &OpKind::MAPPABLE_FILE,
            ]
            .concat(),
        }
    }

    fn range_of(op: &Op) -> Option<(u64, usize)> {
        match *op {
            Op::ReadMany { ref ranges } | Op::PinMany { ref ranges } => ranges.first().copied(),
            Op::Read { position_bytes, length }
            | Op::Allocate { position_bytes, length }
            | Op::PunchHole { position_bytes, length }
            | Op::SyncRange { position_bytes, length }
            | Op::Advise { position_bytes, length, .. }
            | Op::MapRead { position_bytes, length }
            | Op::MapWrite { position_bytes, length, .. }
            | Op::Write { position_bytes, length, .. }
            | Op::Pin { position_bytes, length }
            | Op::Hold { position_bytes, length }
            | Op::PinMut { position_bytes, length, .. } => Some((position_bytes, length)),
            Op::SetLen { length_bytes } => Some((length_bytes, 0)),
            Op::SeekData { position_bytes } | Op::SeekHole { position_bytes } => {
                Some((position_bytes, 1))
            }
            Op::SyncData | Op::SyncAll | Op::SetMemory { .. } => None,
        }
    }

    #[test]
    fn one_seed_is_one_sequence() {
        let take = |seed| Workload::new(seed, limits()).take(100).collect::<Vec<_>>();
        assert_eq!(take(5), take(5));
        assert_ne!(take(5), take(6));
    }

    #[test]
    fn operations_stay_within_the_limits_and_visit_the_edges() {
        let mut seen = (false, false, false);
        for op in (0..50).flat_map(|seed| Workload::new(seed, limits()).take(300)) {
            if let Op::SetMemory { bytes } = op {
                assert!((1 << 20..=2 << 20).contains(&bytes));
            }
            let Some((position, length)) = range_of(&op) else { continue };
            assert!(position + length as u64 <= 200_000, "{op:?}");
            assert!(length <= 50_000, "{op:?}");
            assert!(length > 0 || matches!(op, Op::SetLen { .. }), "{op:?}");
            let end = position + length as u64;
            seen.0 |= end == 200_000;
            seen.1 |= position > 0 && position.is_multiple_of(16384);
            seen.2 |= position > 0 && (position + 1).is_multiple_of(PAGE);
        }
        assert_eq!(seen, (true, true, true));
    }

    #[test]
    fn weights_differ_from_run_to_run_and_only_allowed_kinds_happen() {
        let kinds = vec![OpKind::Read, OpKind::Write];
        let mut drawn = HashSet::new();
        for seed in 0..100 {
            let limits = Limits { kinds: kinds.clone(), ..limits() };
            let workload = Workload::new(seed, limits);
            let weights: Vec<_> = workload.weights().iter().map(|(_, weight)| *weight).collect();
            assert!(weights.iter().sum::<u32>() > 0);
            drawn.insert(weights);
            let allowed = |op: &Op| matches!(op, Op::Read { .. } | Op::Write { .. });
            assert!(workload.take(50).all(|op| allowed(&op)));
        }
        assert!(drawn.len() > 8, "{drawn:?}");
    }
}

//! The writes of one trial: which blocks, in which order, of which version.

use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::sizes::Sizes;

use super::ledger::Ledger;

/// Bytes that a sequential trial writes per call.
pub(crate) const SEQUENTIAL_BLOCK_BYTES: usize = 1 << 20;

/// The order of one trial.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    /// `writes` pages, each at most once.
    Random { writes: u64 },
    /// All of the file in large blocks; the last may be shorter.
    Sequential,
}

/// The blocks of one trial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Writes {
    order: Order,
    access: Access,
    size_bytes: u64,
    pub(crate) version: u32,
}

impl Writes {
    /// Creates the writes of a version, each with its own order.
    pub(crate) fn new(order: Order, sizes: Sizes, version: u32) -> Self {
        let access = Access::new(Pattern::Uniform, sizes.size_bytes, u64::from(version));
        Self { order, access, size_bytes: sizes.size_bytes, version }
    }

    /// Position and length of all blocks.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u64, usize)> + use<> {
        let Self { order, access, size_bytes, .. } = *self;
        let step_bytes = SEQUENTIAL_BLOCK_BYTES as u64;
        let count = match order {
            Order::Random { writes } => writes,
            Order::Sequential => size_bytes.div_ceil(step_bytes),
        };
        (0..count).map(move |index| match order {
            Order::Random { .. } => (access.pos_bytes(index), PAGE_BYTES),
            Order::Sequential => {
                let pos_bytes = index * step_bytes;
                (pos_bytes, (size_bytes - pos_bytes).min(step_bytes) as usize)
            }
        })
    }

    /// The longest block.
    pub(crate) fn block_bytes(&self) -> usize {
        match self.order {
            Order::Random { .. } => PAGE_BYTES,
            Order::Sequential => SEQUENTIAL_BLOCK_BYTES,
        }
    }

    /// Records what was written up to `end_bytes` of the file.
    pub(crate) fn enter(&self, ledger: &mut Ledger, end_bytes: u64) {
        match self.order {
            Order::Sequential => ledger.enter_up_to(end_bytes, self.version),
            Order::Random { .. } => {
                self.blocks().for_each(|(pos_bytes, _)| ledger.enter(pos_bytes, self.version));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_in_order_cover_the_file_random_ones_are_pages() {
        let size_bytes = (2 << 20) + 8192;
        let sizes = Sizes { size_bytes, memory_bytes: 1 << 20 };
        let blocks: Vec<_> = Writes::new(Order::Sequential, sizes, 1).blocks().collect();
        assert_eq!(blocks, [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, 8192)]);
        let random = Writes::new(Order::Random { writes: 100 }, sizes, 1);
        let mut positions: Vec<u64> = random.blocks().map(|(pos_bytes, _)| pos_bytes).collect();
        positions.sort_unstable();
        positions.dedup();
        assert_eq!(positions.len(), 100);
        assert!(positions.iter().all(|at| at + 4096 <= size_bytes));
    }
}

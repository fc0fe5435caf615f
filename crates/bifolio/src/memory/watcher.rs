//! Who must know when memory of a chunk is about to go.
//!
//! Implemented by the engine of `io`, which lets the kernel hold on to chunks (registered buffers).
//! Memory that is held so would stay resident when it is given back, and, worse, a later transfer
//! would reach the old pages: so it must be let go before.

use std::fmt::Debug;

/// Told by the arena, under its lock, about chunks; calls nothing of the arena.
pub(crate) trait ChunkWatcher: Debug + Send + Sync {
    /// Every page of the chunk is resident and charged now.
    fn chunk_is_whole(&self, chunk: usize);

    /// Pages of the chunk are about to be given back, none of which belongs to a folio. When this
    /// returns nobody holds on to the chunk (but for transfers of other folios in it that are in
    /// flight, until they are complete), nor will before it is whole again.
    fn before_release(&self, chunk: usize);
}

//! Storage that loses unsynced changes in a crash.
//!
//! Keeps the bytes that every reader sees (`live`), the bytes that the last sync made durable, and
//! every change in between. A crash keeps the durable bytes and an arbitrary subset of the changes
//! since: all, none, some, or some sectors of one. The length may reflect a write whose bytes were
//! lost, as on file systems; then zeros are found there. A crash never produces a byte that was not
//! written, or a file longer than any call requested.

use std::io;
use std::ops::Range;
use std::slice;
use std::sync::{Mutex, MutexGuard};

use bifolio::backing::{Backing, DirectBacking, FallocateMode, IoBuf, IoBufMut};
use fastrand::Rng;

use crate::memory::{copies, read_vector, write_vector};

/// Unit that a disk writes whole or not at all.
const SECTOR: usize = 512;

/// A file in memory that can crash.
#[derive(Debug)]
pub struct CrashingBacking {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    live: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<Change>,
}

#[derive(Debug)]
enum Change {
    Write { position_bytes: u64, bytes: Vec<u8> },
    SetLen { length: usize },
}

impl CrashingBacking {
    /// A file that durably holds `bytes`.
    pub fn new(bytes: Vec<u8>) -> Self {
        let state = State { live: bytes.clone(), durable: bytes, unsynced: Vec::new() };
        Self { state: Mutex::new(state) }
    }

    /// The bytes that a reader sees now.
    pub fn live(&self) -> Vec<u8> {
        self.state().live.clone()
    }

    /// Returns the bytes that remain if no change since the last sync survives.
    pub fn durable(&self) -> Vec<u8> {
        self.state().durable.clone()
    }

    /// Returns the number of changes that no sync has covered.
    pub fn unsynced(&self) -> usize {
        self.state().unsynced.len()
    }

    /// Returns the file as it may be found after a crash now; `seed` selects one possibility.
    ///
    /// This file continues to exist: a test may examine many crashes at one moment.
    pub fn crash(&self, seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let state = self.state();
        let mut found = state.durable.clone();
        // Drawn per crash, so that all and nothing are common too.
        let chance = random.choice([0.0, 0.1, 0.5, 0.9, 1.0]).expect("not empty");
        for change in &state.unsynced {
            survive(change, &mut found, chance, &mut random);
        }
        Self::new(found)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }
}

/// Applies to `found` what survives of a change that was not durable.
fn survive(change: &Change, found: &mut Vec<u8>, chance: f64, random: &mut Rng) {
    match change {
        Change::SetLen { length } => {
            if random.f64() < chance {
                found.resize(*length, 0);
            }
        }
        Change::Write { position_bytes, bytes } => {
            let end = *position_bytes as usize + bytes.len();
            if end > found.len() && random.f64() < chance {
                found.resize(end, 0);
            }
            for (at, sector) in sectors(*position_bytes, bytes) {
                if random.f64() < chance {
                    write_vector(found, sector, at);
                }
            }
        }
    }
}

/// Splits a write at sector boundaries.
fn sectors(position_bytes: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let first = bytes.len().min(SECTOR - position_bytes as usize % SECTOR);
    let (head, rest) = bytes.split_at(first);
    let all = std::iter::once(head).chain(rest.chunks(SECTOR));
    all.scan(position_bytes, |at, sector| {
        let start = *at;
        *at += sector.len() as u64;
        Some((start, sector))
    })
}

impl Backing for CrashingBacking {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.read_vectored_at(slice::from_mut(target), position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.write_vectored_at(slice::from_ref(source), position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.state();
        state.durable = state.live.clone();
        state.unsynced.clear();
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.state().live.len() as u64)
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        let length = length_bytes as usize;
        let mut state = self.state();
        state.live.resize(length, 0);
        state.unsynced.push(Change::SetLen { length });
        Ok(())
    }

    fn describe(&self) -> String {
        "crashing memory".to_owned()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for CrashingBacking {
    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        Ok(read_vector(&self.state().live, targets, position_bytes))
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        let mut state = self.state();
        for (position_bytes, bytes) in copies(sources, position_bytes) {
            write_vector(&mut state.live, &bytes, position_bytes);
            state.unsynced.push(Change::Write { position_bytes, bytes });
        }
        Ok(sources.iter().map(IoBuf::len).sum())
    }

    fn fallocate(&self, mode: FallocateMode, range: Range<u64>) -> io::Result<()> {
        let len = self.state().live.len() as u64;
        match mode {
            FallocateMode::Allocate if range.end > len => return self.set_len(range.end),
            FallocateMode::Allocate | FallocateMode::AllocateKeepLen => return Ok(()),
            _ => {}
        }
        let [start, end] = [range.start, range.end].map(|end| len.min(end) as usize);
        let mut state = self.state();
        state.live[start..end].fill(0);
        let bytes = vec![0; end - start];
        state.unsynced.push(Change::Write { position_bytes: start as u64, bytes });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio::backing::IoBuffer;
    use std::collections::HashSet;

    fn write(backing: &CrashingBacking, bytes: &[u8], position_bytes: u64) {
        backing.write_at(&IoBuffer::from_bytes(bytes).source(), position_bytes).unwrap();
    }

    #[test]
    fn synced_writes_survive_every_crash() {
        let backing = CrashingBacking::new(vec![1; 1000]);
        write(&backing, &[2; 100], 950);
        backing.set_len(1040).unwrap();
        assert_eq!(backing.unsynced(), 2);
        backing.sync_data().unwrap();
        assert_eq!(backing.unsynced(), 0);
        for seed in 0..50 {
            assert_eq!(backing.crash(seed).live(), backing.live());
        }
        assert_eq!(backing.durable(), backing.live());
    }

    #[test]
    fn unsynced_writes_may_survive_in_part_or_not_at_all() {
        let backing = CrashingBacking::new(vec![1; 4096]);
        write(&backing, &[2; 2000], 1000);
        let mut found = HashSet::new();
        for seed in 0..200 {
            let bytes = backing.crash(seed).live();
            assert_eq!(bytes.len(), 4096);
            assert!(bytes[..1000].iter().chain(&bytes[3000..]).all(|byte| *byte == 1));
            for sector in bytes[1024..2560].chunks(SECTOR) {
                assert!(sector.iter().all(|byte| *byte == sector[0]), "a torn sector");
            }
            found.insert(bytes);
        }
        assert!(found.contains(&backing.live()), "never everything");
        assert!(found.contains(&backing.durable()), "never nothing");
        assert!(found.len() > 10, "hardly ever a part");
        assert_eq!(backing.live()[1000..3000], [2; 2000], "the crash is a copy");
    }

    #[test]
    fn a_crashed_file_is_never_longer_than_requested() {
        let backing = CrashingBacking::new(vec![1; 10]);
        write(&backing, &[2; 5], 1000);
        backing.set_len(700).unwrap();
        write(&backing, &[3; 100], 480);
        let lengths: HashSet<_> = (0..300).map(|seed| backing.crash(seed).live().len()).collect();
        assert_eq!(lengths, HashSet::from([10, 512, 580, 700, 1005]));
    }

    #[test]
    fn one_seed_is_one_crash() {
        let backing = CrashingBacking::new(vec![0; 10_000]);
        write(&backing, &[1; 9000], 5);
        assert_eq!(backing.crash(7).live(), backing.crash(7).live());
    }

    #[test]
    fn a_crash_may_keep_some_windows_of_a_write_and_lose_others() {
        let backing = CrashingBacking::new(vec![0; 1536]);
        let buffers = [1, 2, 3].map(|byte| IoBuffer::from_bytes(&[byte; SECTOR]));
        let sources = buffers.each_ref().map(IoBuffer::source);
        assert_eq!(backing.write_vectored_at(&sources, 0).unwrap(), 1536);
        let whole = [[1; SECTOR], [2; SECTOR], [3; SECTOR]].concat();
        assert_eq!((backing.live(), backing.unsynced()), (whole.clone(), 3));
        let found: HashSet<_> = (0..300).map(|seed| backing.crash(seed).live()).collect();
        assert_eq!(found.len(), 8, "each of the three is there or not");
        backing.sync_data().unwrap();
        assert!((0..50).all(|seed| backing.crash(seed).live() == whole));
        let mut buffers = [IoBuffer::new(SECTOR), IoBuffer::new(SECTOR)];
        let mut targets = buffers.each_mut().map(IoBuffer::target);
        assert_eq!(backing.read_vectored_at(&mut targets, 512).unwrap(), 1024);
        assert_eq!(buffers[1].as_bytes(), [3; SECTOR]);
    }
}

//! The rows `search_hot` and `search_uniform`: the lower bound of a key among the 512 sorted words
//! of a 4 KiB node, one step of a B-tree's descent.
//!
//! Four ways, each with the same search: in place with `read_with`, in place under a pin, in a
//! buffer that `read_at` has filled, and through a plain pointer into memory of the same size,
//! which is the limit. `hot` searches one node, such as the root; `uniform` any node of 16 MiB.

use std::hint::select_unpredictable;
use std::path::Path;
use std::time::Duration;

use bifolio::{Cache, ImmutableFile, OpenOptions};

use super::{LIMIT, OPTIMISTIC, PIN, READ_WITH, case};
use crate::error::{Error, Result};
use crate::harness::measured::Measured;
use crate::harness::reads::{OPERATIONS_PER_LOOK, Positions};
use crate::harness::span::Span;
use crate::harness::threads::run_for;
use crate::run::{Rounds, Run};

const NODE_BYTES: usize = 4096;
const KEYS: usize = NODE_BYTES / size_of::<u64>();
const FILE_BYTES: usize = 16 << 20;
const CACHE_BYTES: u64 = 32 << 20;

/// Names of the rows, with the bytes that are searched.
const PATTERNS: [(&str, usize); 2] = [("search_hot", NODE_BYTES), ("search_uniform", FILE_BYTES)];

/// Memory and disk of the rows, bytes.
pub(super) const NEEDS_BYTES: u64 = CACHE_BYTES + FILE_BYTES as u64;

/// Trials in a round, for each number of threads.
pub(super) const TRIALS: usize = PATTERNS.len() * 4;

/// Fills nodes with keys: even numbers, in order through all of the file.
fn fill(bytes: &mut [u8]) {
    for (number, word) in bytes.chunks_exact_mut(size_of::<u64>()).enumerate() {
        word.copy_from_slice(&(2 * number as u64).to_le_bytes());
    }
}

/// Returns the number of keys below `sought`.
#[inline(always)]
fn lower_bound(sought: u64, key: impl Fn(usize) -> u64) -> usize {
    let (mut low, mut left) = (0, KEYS);
    while left > 1 {
        let half = left / 2;
        // As a conditional move in each way: a mispredicted branch costs more than the loads.
        low = select_unpredictable(key(low + half - 1) < sought, low + half, low);
        left -= half;
    }
    low + usize::from(key(low) < sought)
}

#[inline(always)]
fn search_bytes(node: &[u8], sought: u64) -> usize {
    let (keys, _) = node.as_chunks::<8>();
    lower_bound(sought, |at| u64::from_le_bytes(keys[at]))
}

/// Searches for random keys of random nodes, on each of `cpus`, and checks the places found.
fn search(
    (cpus, extent_bytes): (&[usize], usize),
    duration: Duration,
    search: impl Fn(u64, u64) -> Result<usize> + Sync,
) -> Result<Measured> {
    let prepare = |thread| Ok(Positions::new(extent_bytes as u64, 8, thread as u64));
    run_for(cpus, duration, prepare, |mut positions, window| {
        let mut operations = 0;
        while operations == 0 || !window.is_over() {
            for _ in 0..OPERATIONS_PER_LOOK {
                let position = positions.next();
                let node = position & !(NODE_BYTES as u64 - 1);
                let expected = (position - node) as usize / size_of::<u64>();
                // The key at `position`: twice its number.
                if search(node, position / 4)? != expected {
                    return Err(Error::WrongBytes { series: "search".into(), pos_bytes: position });
                }
            }
            operations += OPERATIONS_PER_LOOK;
        }
        Ok(operations)
    })
}

/// Writes the nodes to a file, and reads all of them into a cache.
fn open(directory: &Path, nodes: &[u8]) -> Result<ImmutableFile> {
    let path = directory.join("nodes");
    std::fs::write(&path, nodes).map_err(Error::system("write the nodes"))?;
    let cache = Cache::builder().memory(CACHE_BYTES).build()?;
    let file = cache.open_immutable(&path, &OpenOptions::new())?;
    // The second read of a page marks it as used.
    for position in (0..2 * FILE_BYTES).step_by(NODE_BYTES) {
        file.read_exact_at(&mut [0; NODE_BYTES], (position % FILE_BYTES) as u64)?;
    }
    Ok(file)
}

pub(super) fn measure(
    run: &mut Run<'_>,
    threads: &[usize],
    cpus: &[usize],
    rounds: Rounds,
) -> Result<()> {
    let plain = Span::plain(FILE_BYTES as u64, fill)?;
    let plain = plain.bytes(0, FILE_BYTES);
    let file = &open(run.workspace.path(), plain)?;
    let node_of = |start: u64| start..start + NODE_BYTES as u64;
    let mut rows = run.rows();
    for &threads in threads {
        for (pattern, extent_bytes) in PATTERNS {
            rows.row(case(pattern, NODE_BYTES, threads), ("ops/s", Measured::rate));
            let load = (&cpus[..threads], extent_bytes);
            rows.series(PIN, move |trial| {
                search(load, trial, |start, sought| {
                    Ok(search_bytes(&file.pin(node_of(start))?, sought))
                })
            });
            rows.series(OPTIMISTIC, move |trial| {
                search(load, trial, |start, sought| {
                    let mut node = [0; NODE_BYTES];
                    file.read_exact_at(&mut node, start)?;
                    Ok(search_bytes(&node, sought))
                })
            });
            rows.series(READ_WITH, move |trial| {
                search(load, trial, |start, sought| {
                    Ok(file.read_with(node_of(start), |node| {
                        lower_bound(sought, |at| node.array(at * 8).map_or(0, u64::from_le_bytes))
                    })?)
                })
            });
            rows.series(LIMIT, move |trial| {
                search(load, trial, |start, sought| {
                    Ok(search_bytes(&plain[start as usize..][..NODE_BYTES], sought))
                })
            });
        }
    }
    run.measure("search nodes", rows, rounds)
}

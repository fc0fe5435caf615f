//! Neighbouring pages on neighbouring frames: counted, while frames are free and after churn.
//!
//! The churn is counted, too: a cache that has been replaced many times over by random reads. The
//! bytes of every read are checked, since folios move meanwhile.

mod support;

use bifolio::{Backing, Cache, File, IoSource, IoTarget, OpenOptions, Placement};
use fastrand::Rng;
use std::io;
use std::sync::Arc;
use std::thread;
use support::{PAGE, cache_of, writable};

const MIB: u64 = 1 << 20;

/// Storage in which each page holds its number, and stays so whatever is written.
#[derive(Debug)]
struct Numbered {
    len_bytes: u64,
}

impl Backing for Numbered {
    fn read_at(&self, target: &mut IoTarget<'_>, position_bytes: u64) -> io::Result<usize> {
        let length = (target.len() as u64).min(self.len_bytes.saturating_sub(position_bytes));
        for offset in (0..length).step_by(PAGE as usize) {
            let page = (position_bytes + offset) / PAGE;
            target.copy_from_slice(offset as usize, &page.to_le_bytes());
        }
        Ok(length as usize)
    }

    fn write_at(&self, source: &IoSource<'_>, _position_bytes: u64) -> io::Result<usize> {
        Ok(source.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync_all(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len_bytes)
    }

    fn set_len(&self, _length_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn describe(&self) -> String {
        "numbered pages".to_owned()
    }
}

fn open(cache: &Cache, len_bytes: u64, options: &OpenOptions) -> File {
    cache.open_backing(Arc::new(Numbered { len_bytes }), options).unwrap()
}

/// How a file is filled in order.
#[derive(Clone, Copy, Debug)]
enum Fill {
    Reads(u64),
    Writes(u64),
}

const FILLS: [Fill; 3] = [Fill::Reads(PAGE), Fill::Reads(MIB), Fill::Writes(PAGE)];

/// Fills a new file of `len_bytes` bytes in order.
fn fill(cache: &Cache, len_bytes: u64, folio_bytes: u64, how: Fill) -> File {
    let (Fill::Reads(step) | Fill::Writes(step)) = how;
    let file = open(cache, len_bytes, &writable().folio_bytes(folio_bytes));
    let mut buffer = vec![0; step as usize];
    for position in (0..len_bytes).step_by(step as usize) {
        match how {
            Fill::Reads(_) => file.read_exact_at(&mut buffer, position).unwrap(),
            Fill::Writes(_) => file.write_all_at(&buffer, position).unwrap(),
        }
    }
    file
}

/// The part of neighbours that lie side by side.
fn adjacency(placement: &Placement) -> f64 {
    placement.adjacent_neighbours as f64 / placement.neighbours as f64
}

#[derive(Clone, Copy, Debug)]
enum Access {
    Uniform,
    /// Half of the reads on a tenth of the file.
    Skewed,
}

impl Access {
    fn page(self, random: &mut Rng, pages: u64) -> u64 {
        match self {
            Access::Skewed if random.bool() => random.u64(..pages / 10) * 10,
            _ => random.u64(..pages),
        }
    }
}

/// Reads, and in one of 16 steps writes, at random from two threads, until the cache has been
/// replaced `turnovers` times. Gives the hit ratio of the last half.
fn churn(cache: &Cache, file: &File, access: Access, turnovers: u64) -> f64 {
    let frames = cache.stats().bound_bytes / PAGE;
    let rounds = |turnovers_each: u64| {
        let before = cache.stats();
        let steps: u64 = thread::scope(|scope| {
            let run = |seed| {
                move || churn_thread(cache, file, access, seed, before.pgsteal + turnovers_each * frames)
            };
            let threads = [1, 2].map(|seed| scope.spawn(run(seed)));
            threads.map(|thread| thread.join().unwrap()).iter().sum()
        });
        1.0 - (cache.stats().misses - before.misses) as f64 / steps as f64
    };
    rounds(turnovers / 2);
    rounds(turnovers / 2)
}

fn churn_thread(cache: &Cache, file: &File, access: Access, seed: u64, pgsteal: u64) -> u64 {
    let mut random = Rng::with_seed(seed);
    let pages = file.len() / PAGE;
    let mut buffer = [0; PAGE as usize];
    let mut steps = 0;
    while steps % 1024 != 0 || cache.stats().pgsteal < pgsteal {
        let page = access.page(&mut random, pages);
        if steps % 16 == 0 {
            file.write_all_at(&page.to_le_bytes(), page * PAGE).unwrap();
        } else {
            file.read_exact_at(&mut buffer, page * PAGE).unwrap();
            assert_eq!(u64::from_le_bytes(buffer[..8].try_into().unwrap()), page);
        }
        steps += 1;
    }
    steps
}

#[test]
fn measure() {
    for access in [Access::Uniform, Access::Skewed] {
        for how in FILLS {
            let bound = 64 * MIB;
            let cache = cache_of(bound);
            let churned = open(&cache, 4 * bound, &writable());
            let hits = churn(&cache, &churned, access, 20);
            let before = cache.stats();
            let file = fill(&cache, 16 * MIB, PAGE, how);
            let placement = file.placement();
            let moved = cache.stats();
            println!(
                "{access:?} {how:?}: adjacency {:.3} of {}, hit ratio {hits:.4}, direct {}",
                adjacency(&placement), placement.neighbours,
                moved.direct_reclaims - before.direct_reclaims,
            );
            println!("{moved:?}");
        }
    }
}

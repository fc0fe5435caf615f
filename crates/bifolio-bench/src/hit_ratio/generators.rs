//! Traces that are generated: what programs do to their pages, each kind alone.
//!
//! A generator has a footprint (`pages`) and returns the pages that are referenced, in order. The
//! same footprint and length give the same trace.

use crate::harness::access::Permutation;
use crate::harness::access::Zipf;

/// A kind of trace.
#[derive(Clone, Copy, Debug)]
pub struct Generator {
    /// The value of the key `trace` in reports.
    pub name: &'static str,
    /// Returns `references` page numbers below `pages`.
    pub generate: fn(pages: u32, references: usize) -> Vec<u32>,
    /// Upper bound on misses beside LRU's, at the size of the cache that is summarised.
    pub at_most: f64,
}

/// Every generator.
pub const GENERATORS: [Generator; 7] = [
    Generator { name: "zipf", generate: zipf, at_most: 0.88 },
    Generator { name: "zipf_and_scans", generate: zipf_and_scans, at_most: 0.90 },
    Generator { name: "bursts", generate: bursts, at_most: 1.05 },
    Generator { name: "b_tree", generate: b_tree, at_most: 0.90 },
    Generator { name: "tenants", generate: tenants, at_most: 0.96 },
    Generator { name: "moving_set", generate: moving_set, at_most: 1.05 },
    Generator { name: "loop", generate: around, at_most: 1.05 },
];

const EXPONENT: f64 = 0.8;

/// Independent references, scattered over the footprint by Zipf's law.
fn skewed(pages: u32, seed: u64) -> impl FnMut(&mut fastrand::Rng) -> u32 {
    let (law, places) =
        (Zipf::new(u64::from(pages), EXPONENT), Permutation::new(u64::from(pages), seed));
    move |random| places.apply(law.draw(random) - 1) as u32
}

fn zipf(pages: u32, references: usize) -> Vec<u32> {
    let (mut random, mut next) = (fastrand::Rng::with_seed(1), skewed(pages, 1));
    (0..references).map(|_| next(&mut random)).collect()
}

/// Two thirds of the footprint are skewed; the last third is read from front to back, four times.
fn zipf_and_scans(pages: u32, references: usize) -> Vec<u32> {
    let points = pages / 3 * 2;
    let (mut random, mut next) = (fastrand::Rng::with_seed(2), skewed(points, 2));
    let mut trace = Vec::with_capacity(references);
    while trace.len() < references {
        let until_scan = references / 4 - (pages - points) as usize;
        trace.extend((0..until_scan).map(|_| next(&mut random)));
        trace.extend(points..pages);
    }
    trace.truncate(references);
    trace
}

/// A third of the skewed references come once more a little later, as when a record is found and
/// then changed: within 1/200 of the footprint, so 5 % of a cache of 10 %.
fn bursts(pages: u32, references: usize) -> Vec<u32> {
    let (mut random, mut next) = (fastrand::Rng::with_seed(3), skewed(pages, 3));
    let delay_max = (pages as usize / 200).max(2);
    let mut late = vec![None; delay_max];
    let mut trace = Vec::with_capacity(references);
    while trace.len() < references {
        let now = trace.len() % delay_max;
        let page = late[now].take().unwrap_or_else(|| {
            let page = next(&mut random);
            if random.u8(0..2) == 0 {
                late[(now + random.usize(1..delay_max)) % delay_max] = Some(page);
            }
            page
        });
        trace.push(page);
    }
    trace
}

/// Descents of a tree: the root, an inner page and a leaf, whose keys are skewed. A page has 100
/// children.
fn b_tree(pages: u32, references: usize) -> Vec<u32> {
    const CHILDREN: u32 = 100;
    let inner = pages / (CHILDREN + 1);
    let leaves = pages - inner - 1;
    let (mut random, mut next) = (fastrand::Rng::with_seed(4), skewed(leaves, 4));
    let mut trace = Vec::with_capacity(references + 2);
    while trace.len() < references {
        let leaf = next(&mut random);
        trace.extend([0, 1 + (leaf / CHILDREN).min(inner - 1), 1 + inner + leaf]);
    }
    trace.truncate(references);
    trace
}

/// One program reads half of the footprint round and round, another reads the other half at random,
/// skewed.
fn tenants(pages: u32, references: usize) -> Vec<u32> {
    let (mut random, mut next) = (fastrand::Rng::with_seed(5), skewed(pages / 2, 5));
    let mut scanned = 0;
    let reference = |_| {
        if random.bool() {
            return next(&mut random);
        }
        scanned = (scanned + 1) % (pages - pages / 2);
        pages / 2 + scanned
    };
    (0..references).map(reference).collect()
}

/// Nine of ten references are skewed over a fifth of the footprint, which is another fifth after
/// every eighth of the trace; the rest is uniform.
fn moving_set(pages: u32, references: usize) -> Vec<u32> {
    let (mut random, mut next) = (fastrand::Rng::with_seed(6), skewed(pages / 5, 6));
    let places = Permutation::new(u64::from(pages), 6);
    let reference = |index: usize| {
        let start = (index / (references / 8)) as u32 * (pages / 5);
        let is_hot = random.u8(0..10) > 0;
        let page = if is_hot { (start + next(&mut random)) % pages } else { random.u32(0..pages) };
        places.apply(u64::from(page)) as u32
    };
    (0..references).map(reference).collect()
}

/// The whole footprint, round and round: no policy without a long memory hits anything.
fn around(pages: u32, references: usize) -> Vec<u32> {
    (0..references).map(|index| (index % pages as usize) as u32).collect()
}

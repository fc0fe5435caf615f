//! Random loads, stores and calls of one thread, compared with a plain vector, and at the end with
//! an independent read of the disk.
//!
//! The file is several times as large as the cache, so pages are read and evicted all the time.
//! `SEED=` replays a failed run.
//!
//! # Safety
//! Only bytes before the end of the file, or past it in its last page, are touched.
#![allow(unsafe_code)]

use std::ops::Range;
use std::path::Path;

use bifolio::{Cache, Feature, File, OwnedPageRef, ReadRequest};
use bifolio_testing::{fill_bytes, with_seeds};
use fastrand::Rng;

use crate::setup::{MASKS, View, Way, load, store};
use crate::support::{PAGE, assert_same, directory, file_of, read, read_all};

/// Sizes of cache and file.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    memory_bytes: u64,
    length_bytes_max: u64,
    steps: u32,
}

/// One batch is a few pages.
const TINY: Sizes = Sizes { memory_bytes: 512 << 10, length_bytes_max: 2_500_000, steps: 600 };
/// Batches of 31.
const SMALL: Sizes = Sizes { memory_bytes: 8 << 20, length_bytes_max: 24 << 20, steps: 500 };

/// A file, its maps, and its expected content.
struct Run<'c> {
    cache: &'c Cache,
    file: File,
    model: Vec<u8>,
    /// Maps, each with its range of the file.
    maps: Vec<(Range<u64>, View)>,
    pins: Vec<OwnedPageRef>,
    sizes: Sizes,
    random: Rng,
}

impl<'c> Run<'c> {
    fn new(cache: &'c Cache, file: File, model: Vec<u8>, sizes: Sizes, seed: u64) -> Self {
        let random = Rng::with_seed(seed);
        let mut run =
            Self { cache, file, model, maps: Vec::new(), pins: Vec::new(), sizes, random };
        run.add_map(0..run.len(), true);
        run.add_map(0..run.len(), false);
        run.add_map(run.len() / 3..run.len() / 2, true);
        run
    }

    fn len(&self) -> u64 {
        self.model.len() as u64
    }

    fn add_map(&mut self, range: Range<u64>, is_writable: bool) {
        let view = if is_writable {
            View::Write(self.file.map_mut(range.clone()).unwrap())
        } else {
            View::Read(self.file.map(range.clone()).unwrap())
        };
        self.maps.push((range, view));
    }

    /// Returns a range of the file that is not empty; `None` if the file is.
    fn range(&mut self) -> Option<Range<u64>> {
        let len = self.len();
        (len > 0).then(|| {
            let start = self.random.u64(..len);
            let most = [8, 300, 10_000, self.sizes.memory_bytes / 6];
            let most = self.random.choice(most).unwrap();
            let length = self.random.u64(1..=most);
            start..(start + length).min(len)
        })
    }

    /// Returns a part of a map inside the file.
    fn mapped(&mut self, writable: bool) -> Option<(usize, Range<u64>)> {
        let fits = |view: &View| !writable || matches!(view, View::Write(_));
        let found = self.maps.iter().enumerate().filter(|(_, (_, view))| fits(view));
        let fitting: Vec<usize> = found.map(|(at, _)| at).collect();
        let at = self.random.choice(fitting)?;
        let range = self.range()?;
        let mapped = self.maps[at].0.clone();
        let cut = range.start.max(mapped.start)..range.end.min(mapped.end).min(self.len());
        (cut.start < cut.end).then_some((at, cut))
    }

    fn load(&mut self) {
        let Some((at, range)) = self.mapped(false) else { return };
        let (mapped, view) = &self.maps[at];
        let found = load(view.pointer(), range.start - mapped.start..range.end - mapped.start);
        assert_same(&found, &self.model[range.start as usize..range.end as usize]);
    }

    fn store(&mut self) {
        let Some((at, range)) = self.mapped(true) else { return };
        let bytes = fill_bytes(self.random.u64(..), (range.end - range.start) as usize);
        let (mapped, View::Write(map)) = &mut self.maps[at] else { unreachable!("chosen so") };
        store(map.as_mut_ptr(), range.start - mapped.start, &bytes);
        self.model[range.start as usize..range.end as usize].copy_from_slice(&bytes);
    }

    /// Stores bytes past the end of file, which must never be found in the file.
    fn store_behind_the_end(&mut self) {
        let (start, end) = (self.len(), self.len().next_multiple_of(PAGE));
        for (mapped, view) in &mut self.maps {
            if let View::Write(map) = view
                && start < end
                && mapped.start <= start
                && mapped.end >= end
            {
                store(map.as_mut_ptr(), start - mapped.start, &vec![0xBB; (end - start) as usize]);
                return;
            }
        }
    }

    fn read(&mut self) {
        let Some(range) = self.range() else { return };
        let expected = &self.model[range.start as usize..range.end as usize];
        assert_same(&read(&self.file, range.start, expected.len()), expected);
    }

    fn read_many(&mut self) {
        let ranges: Vec<Range<u64>> = (0..6).filter_map(|_| self.range()).collect();
        let length = |range: &Range<u64>| (range.end - range.start) as usize;
        let mut buffers: Vec<_> = ranges.iter().map(|range| vec![0xEE; length(range)]).collect();
        let mut requests: Vec<_> = ranges
            .iter()
            .zip(&mut buffers)
            .map(|(range, buffer)| ReadRequest::new(buffer, range.start))
            .collect();
        self.file.read_many(&mut requests).unwrap();
        for (range, found) in ranges.iter().zip(&buffers) {
            assert_same(found, &self.model[range.start as usize..range.end as usize]);
        }
    }

    fn write(&mut self) {
        let Some(range) = self.range() else { return };
        let length = self.random.u64(1..20_000).min(self.sizes.length_bytes_max - range.start);
        let bytes = fill_bytes(self.random.u64(..), length as usize);
        self.file.write_all_at(&bytes, range.start).unwrap();
        let end = (range.start + length) as usize;
        self.model.resize(self.model.len().max(end), 0);
        self.model[range.start as usize..end].copy_from_slice(&bytes);
    }

    /// Compares a page through a pin, and changes it through another.
    fn pin(&mut self) {
        let Some(range) = self.range() else { return };
        let range = range.start..range.end.min((range.start / PAGE + 1) * PAGE);
        let (start, end) = (range.start as usize, range.end as usize);
        let mut found = vec![0; end - start];
        self.file.pin(range.clone()).unwrap().copy_to(0, &mut found).unwrap();
        assert_same(&found, &self.model[start..end]);
        let bytes = fill_bytes(self.random.u64(..), end - start);
        self.file.pin_mut(range).unwrap().copy_from(0, &bytes).unwrap();
        self.model[start..end].copy_from_slice(&bytes);
    }

    fn set_len(&mut self) {
        let max = self.sizes.length_bytes_max;
        let length = if self.random.bool() {
            self.len().saturating_sub(self.random.u64(..max / 8))
        } else {
            (self.len() + self.random.u64(..max / 4)).min(max)
        };
        self.file.set_len(length).unwrap();
        self.model.resize(length as usize, 0);
    }

    fn punch(&mut self) {
        let Some(range) = self.range().filter(|_| self.file.is_memory_file()) else { return };
        self.file.punch_hole(range.clone()).unwrap();
        self.model[range.start as usize..range.end as usize].fill(0);
    }

    fn allocate(&mut self) {
        let Some(range) = self.range().filter(|_| self.file.is_memory_file()) else { return };
        self.file.allocate(range).unwrap();
    }

    fn remap(&mut self) {
        let dropped = self.random.usize(1..self.maps.len());
        drop(self.maps.swap_remove(dropped));
        let whole = 0..self.len().max(1);
        let range = self.range().filter(|_| self.random.bool()).unwrap_or(whole);
        if self.len() > 0 {
            let is_writable = self.random.bool();
            self.add_map(range, is_writable);
        }
        if self.maps.len() < 2 {
            self.file.set_len(PAGE).unwrap();
            self.model.resize(PAGE as usize, 0);
            self.add_map(0..PAGE, true);
        }
    }

    fn map_call(&mut self) {
        let Some((at, range)) = self.mapped(false) else { return };
        let (mapped, view) = &self.maps[at];
        let inside = range.start - mapped.start..range.end - mapped.start;
        let View::Write(map) = view else {
            let View::Read(map) = view else { return };
            map.populate(inside).unwrap();
            return assert!(map.take_error().is_none());
        };
        match self.random.u32(..4) {
            0 => map.sync(inside).unwrap(),
            1 => map.populate(inside).unwrap(),
            2 => self.file.prefetch(range).unwrap(),
            _ => {
                let end = inside.end.min(inside.start + 8 * PAGE);
                self.pins.push(map.pin(inside.start..end).unwrap());
            }
        }
        if self.pins.len() > 2 {
            self.pins.swap_remove(self.random.usize(..2));
        }
    }

    fn step(&mut self) {
        match self.random.u32(..100) {
            0..25 => self.load(),
            25..52 => self.store(),
            52..60 => self.read(),
            60..64 => self.read_many(),
            64..70 => self.write(),
            70..75 => self.pin(),
            75..78 => self.set_len(),
            78..82 => self.punch(),
            82..84 => self.allocate(),
            84..86 => self.remap(),
            86..93 => self.map_call(),
            93..95 => self.file.sync_data().unwrap(),
            95..97 => self.store_behind_the_end(),
            97..98 => drop(self.pins.pop()),
            _ => {
                let max = self.sizes.memory_bytes;
                self.cache.set_memory(self.random.u64(max / 4 * 3..=max)).unwrap();
            }
        }
    }

    /// Runs, and compares everything through a map and through reads.
    fn run(mut self) -> (File, Vec<u8>) {
        for step in 0..self.sizes.steps {
            self.step();
            let stats = self.cache.stats();
            assert!(stats.memory.used_bytes <= stats.memory.bound_bytes, "step {step}: {stats:?}");
        }
        let len = self.len();
        if len > 0 {
            self.add_map(0..len, false);
            let found = load(self.maps.last().unwrap().1.pointer(), 0..len);
            assert_same(&found, &self.model);
        }
        assert_same(&read_all(&self.file), &self.model);
        for (_, view) in &self.maps {
            if let View::Write(map) = view {
                assert!(map.take_error().is_none());
            }
        }
        let stats = self.cache.stats();
        assert!(
            stats.maps.unmapped_pages > 0 && stats.maps.unmap_flushes > 0,
            "no eviction: {stats:?}"
        );
        (self.file, self.model)
    }
}

fn on_disk(way: Way, sizes: Sizes, seed: u64) {
    let directory = directory();
    let model = fill_bytes(seed, sizes.length_bytes_max as usize / 8 * 7);
    let path = file_of(&directory, "mapped", &model);
    // The kernel's own write-out of it must not meet ours.
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    let cache = way.builder(sizes.memory_bytes).build().unwrap();
    let file = cache.open(&path, &way.options()).unwrap();
    let (file, mut model) = Run::new(&cache, file, model, sizes, seed).run();
    file.sync_data().unwrap();
    compare_with_disk(&path, &model);
    // What is stored last is written when the file is closed.
    if !model.is_empty() {
        let mut map = file.map_mut(0..file.len()).unwrap();
        let last = model.len() - 1;
        model[last] = !model[last];
        store(map.as_mut_ptr(), last as u64, &model[last..]);
        drop(map);
    }
    drop(file);
    cache.close().unwrap();
    compare_with_disk(&path, &model);
}

fn compare_with_disk(path: &Path, model: &[u8]) {
    assert_same(&std::fs::read(path).unwrap(), model);
}

fn in_memory(way: Way, sizes: Sizes, seed: u64) {
    let cache = way.swapping(sizes.memory_bytes);
    let length = sizes.length_bytes_max / 8 * 7;
    let file = way.memory_file(&cache, length);
    let (file, _) = Run::new(&cache, file, vec![0; length as usize], sizes, seed).run();
    let stats = cache.stats();
    assert!(stats.storage.swapped_out_pages > 0 && stats.storage.swapped_in_pages > 0, "{stats:?}");
    drop(file);
    let stats = cache.stats();
    assert_eq!(
        (stats.memory.swap_bytes, stats.memory.unswapped_bytes),
        (0, 0),
        "places are left: {stats:?}"
    );
    cache.close().unwrap();
}

#[test]
fn a_mapped_disk_file_agrees_with_the_model_and_the_disk() {
    for way in Way::whole() {
        with_seeds(2, |seed| on_disk(way, TINY, seed));
        with_seeds(1, |seed| on_disk(way, SMALL, seed));
    }
}

#[test]
fn a_mapped_memory_file_agrees_with_the_model() {
    for way in Way::whole() {
        with_seeds(2, |seed| in_memory(way, TINY, seed));
        with_seeds(1, |seed| in_memory(way, SMALL, seed));
    }
}

#[test]
fn both_agree_with_the_model_whatever_the_kernel_lacks() {
    let sizes = Sizes { steps: 300, ..TINY };
    for way in Way::all().into_iter().filter(|way| way.masked.is_some()) {
        with_seeds(1, |seed| on_disk(way, sizes, seed));
        with_seeds(1, |seed| in_memory(way, sizes, seed));
    }
    assert!(MASKS.contains(&Feature::VectoredUnmap));
}

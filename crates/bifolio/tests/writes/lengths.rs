//! Changes of the length and holes, racing with writes, write-outs and pins: appended bytes are not
//! lost, zeros that are read are correct, and no call waits forever.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::support::{
    PAGE, ThreadState, cache_of, files_can_be_mapped, mappable, read, read_all, wait_until,
    writable,
};
use bifolio::{Cache, ErrorKind, File, OwnedPageRef};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking};

/// A cache that swaps out to storage that can be made to wait.
struct Full {
    swap: Arc<FaultyBacking>,
    cache: Cache,
    /// A file whose pages fill the memory.
    other: File,
    holds: Vec<OwnedPageRef>,
}

impl Full {
    fn new() -> Self {
        let swap = Arc::new(FaultyBacking::new(MemoryBacking::new(Vec::new())));
        let builder = Cache::builder().memory(512 << 10).readahead_max(0);
        let builder = builder.reclaim_wait_max(Duration::from_millis(30_000));
        let cache = builder.swap_backing(swap.clone()).build().unwrap();
        let backing = Arc::new(MemoryBacking::new(vec![2; 1 << 20]));
        let other = cache.open_backing(backing, &writable()).unwrap();
        Self { swap, cache, other, holds: Vec::new() }
    }

    /// Pins pages until no other fits.
    fn hold_all(&mut self) {
        loop {
            let start = self.holds.len() as u64 * PAGE;
            match self.other.pin(start..start + PAGE) {
                Ok(pin) => self.holds.push(pin.into_owned()),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
                    return;
                }
            }
        }
    }

    /// Pins `pages` pages, for which there is memory.
    fn hold(&mut self, pages: usize) {
        for _ in 0..pages {
            let start = self.holds.len() as u64 * PAGE;
            self.holds.push(self.other.pin(start..start + PAGE).unwrap().into_owned());
        }
    }

    /// Unpins `pages` pages and frees them, without reclaim.
    fn let_go(&mut self, pages: usize) {
        for _ in 0..pages {
            drop(self.holds.pop().unwrap());
            let start = self.holds.len() as u64 * PAGE;
            let page = start..start + PAGE;
            // Reclaim in the background may be looking at it.
            wait_until("the page goes", || {
                self.other.evict(page.clone()).unwrap();
                self.other.residency(page.clone()).unwrap().resident == 0
            });
        }
    }
}

/// An overwrite waits for memory. Meanwhile another thread appends to the page.
#[test]
fn an_overwrite_that_waits_for_memory_keeps_what_is_appended() {
    let mut full = Full::new();
    let backing = Arc::new(MemoryBacking::new(vec![b'a'; 100]));
    let file = full.cache.open_backing(backing, &writable()).unwrap();
    assert_eq!(read_all(&file), [b'a'; 100]);
    file.evict(0..100).unwrap();
    // Its tables and slots are paid for, and it has no page.
    let scratch = full.cache.memory_file("scratch").unwrap();
    scratch.write_all_at(&[1; PAGE as usize], 0).unwrap();
    scratch.punch_hole(0..PAGE).unwrap();
    full.hold_all();
    let room_pages = full.holds.len();
    full.let_go(room_pages);
    let gate = Gate::new();
    full.swap.inject(Fault::on(Call::Write).forever().held(&gate));
    scratch.write_all_at(&[1; PAGE as usize], 0).unwrap();
    full.hold(room_pages - 1);

    let writer = ThreadState::default();
    thread::scope(|scope| {
        let overwrite = scope.spawn(|| writer.follow(|| file.write_all_at(&[b'b'; 100], 0)));
        gate.wait_for_arrivals(1);
        writer.wait_until_asleep();
        // More than are needed, if the overwrite should not wait yet.
        full.let_go(3);
        file.write_all_at(&[b'c'; 100], 100).unwrap();
        file.sync_data().unwrap();
        file.evict(0..200).unwrap();
        gate.open();
        overwrite.join().unwrap().unwrap();
    });
    assert_eq!(read(&file, 0, 300), [[b'b'; 100], [b'c'; 100]].concat());
}

/// Pages past the new end are dirty and are written out between the truncation and their removal.
#[test]
fn holes_after_a_cut_under_write_outs_read_as_zeros() {
    let cache = cache_of(1 << 20);
    let backing = Arc::new(MemoryBacking::new(Vec::new()));
    let file = cache.open_backing(backing, &writable()).unwrap();
    file.write_all_at(&[1; 20 * PAGE as usize], 0).unwrap();
    thread::scope(|scope| {
        // Keeps the removal from coming farther than this.
        let pin = file.pin_mut(0..PAGE).unwrap();
        let cut = scope.spawn(|| file.set_len(0));
        wait_until("the file is cut", || file.len() == 0);
        let sync = scope.spawn(|| file.sync_data());
        wait_until("the rest is clean", || cache.stats().memory.dirty_bytes <= PAGE);
        drop(pin);
        cut.join().unwrap().unwrap();
        sync.join().unwrap().unwrap();
    });
    file.write_all_at(&[2], 2 << 20).unwrap();
    assert_eq!(read(&file, 0, 32 * PAGE as usize), [0; 32 * PAGE as usize]);
    assert_eq!(read(&file, 2 << 20, 10), [2]);
}

/// The kernel, for example, reports lost data for direct writes that race with a change of the
/// length.
#[test]
fn no_change_of_the_length_meets_a_write_of_the_backing() {
    for length in [10 * PAGE, 1] {
        let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(Vec::new())));
        let cache = cache_of(1 << 20);
        let file = cache.open_backing(backing.clone(), &writable()).unwrap();
        file.write_all_at(&[1; 100], 0).unwrap();
        let gate = Gate::new();
        backing.inject(Fault::on(Call::Write).held(&gate));
        let changer = ThreadState::default();
        thread::scope(|scope| {
            let sync = scope.spawn(|| file.sync_data());
            gate.wait_for_arrivals(1);
            let change = scope.spawn(|| changer.follow(|| file.set_len(length)));
            changer.wait_until_asleep();
            let calls = backing.calls(Call::SetLen);
            gate.open();
            sync.join().unwrap().unwrap();
            change.join().unwrap().unwrap();
            assert_eq!(calls, 0, "to {length} bytes");
        });
        assert_eq!(backing.calls(Call::SetLen), 1);
        assert_eq!(file.len(), length);
        let left = length.min(100) as usize;
        assert_eq!(read_all(&file), [vec![1; left], vec![0; length as usize - left]].concat());
    }
}

/// A hole is punched over pages one of which another thread is changing; that thread then locks
/// another.
#[test]
fn a_writer_of_one_page_of_a_hole_can_use_the_others() {
    if !files_can_be_mapped() {
        return;
    }
    let cache = cache_of(8 << 20);
    let file = cache.memory_file_with("scratch", &mappable(writable())).unwrap();
    file.write_all_at(&[1; 8 * PAGE as usize], 0).unwrap();
    let puncher = ThreadState::default();
    thread::scope(|scope| {
        let pin = file.pin_mut(5 * PAGE..6 * PAGE).unwrap();
        let punch = scope.spawn(|| puncher.follow(|| file.punch_hole(0..8 * PAGE)));
        puncher.wait_until_asleep();
        let other = scope.spawn(|| read(&file, PAGE, 10));
        wait_until("another page can be read", || other.is_finished());
        drop(pin);
        punch.join().unwrap().unwrap();
    });
    assert_eq!(read_all(&file), [0; 8 * PAGE as usize]);
}

#[test]
fn a_hole_with_two_swapped_ends_needs_room_for_one_page() {
    let mut full = Full::new();
    let file = full.cache.memory_file("scratch").unwrap();
    file.write_all_at(&[1; 2 * PAGE as usize], 0).unwrap();
    full.hold_all();
    assert_eq!(full.cache.stats().memory.unswapped_bytes, 0, "all is swapped");
    full.let_go(1);
    file.punch_hole(1000..PAGE + 1000).unwrap();
    full.let_go(2);
    let mut expected = vec![1; 2 * PAGE as usize];
    expected[1000..PAGE as usize + 1000].fill(0);
    assert_eq!(read_all(&file), expected);
}

/// The pages of one file are evicted for those of the other.
#[test]
fn a_change_of_one_length_holds_up_no_read_of_another_file() {
    if !files_can_be_mapped() {
        return;
    }
    let bytes = vec![1; 12 << 20];
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(bytes.clone())));
    let cache = cache_of(8 << 20);
    let options = mappable(writable());
    let file = cache.open_backing(backing.clone(), &options).unwrap();
    let other = cache.open_backing(Arc::new(MemoryBacking::new(bytes.clone())), &options).unwrap();
    assert_eq!(read_all(&file), bytes);
    let gate = Gate::new();
    backing.inject(Fault::on(Call::SetLen).held(&gate));
    thread::scope(|scope| {
        let change = scope.spawn(|| file.set_len(10 << 20));
        gate.wait_for_arrivals(1);
        let reader = scope.spawn(|| read_all(&other));
        wait_until("the other file is read", || reader.is_finished());
        gate.open();
        assert_eq!(reader.join().unwrap(), bytes);
        change.join().unwrap().unwrap();
    });
}

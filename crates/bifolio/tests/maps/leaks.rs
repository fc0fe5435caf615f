//! Resources that a cache with maps must release when it ends: its address space, memory and
//! descriptors, even if some bytes could not be written.
//!
//! # Safety
//! Accesses bytes of maps that are valid, in processes that run nothing else.
#![allow(unsafe_code)]

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use bifolio_testing::{Call, Fault};

use crate::poisoned::break_pipes;
use crate::setup::{Way, run_child, store};
use crate::support::{self, Faulty, PAGE};

const VARIABLE: &str = "BIFOLIO_TEST_MAP_LEAKS";
const END: &str = "it has ended well";
const ROUNDS: usize = 6;
/// Address space of each map: more than everything else that the process may use.
const LEN_MAX: u64 = 64 << 30;
const MEMORY: u64 = 32 << 20;

/// Resources of the process.
#[derive(Clone, Copy, Debug)]
struct Taken {
    mappings: usize,
    descriptors: usize,
    threads: usize,
    address_space_bytes: u64,
    resident_bytes: u64,
}

impl Taken {
    /// Waits until all other threads have ended: all but this one and the first.
    fn at_rest() -> Self {
        support::wait_until("threads have ended", || Self::now().threads <= 2);
        Self::now()
    }

    fn now() -> Self {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let sizes = fs::read_to_string("/proc/self/statm").unwrap();
        let mut pages = sizes.split(' ').map(|pages| pages.parse::<u64>().unwrap());
        let entries = |of: &str| fs::read_dir(format!("/proc/self/{of}")).unwrap().count();
        Self {
            mappings: maps.lines().count(),
            descriptors: entries("fd"),
            threads: entries("task"),
            address_space_bytes: pages.next().unwrap() * PAGE,
            resident_bytes: pages.next().unwrap() * PAGE,
        }
    }

    /// Checks that the resources taken since are fewer than those of one cache, for each kind.
    /// Threads that have ended may need a moment to disappear.
    fn check_nothing_is_left(self, what: &str) {
        support::wait_until(&format!("{what}: {self:?}"), || {
            let now = Self::now();
            let is_left = now.threads != self.threads
                || now.descriptors != self.descriptors
                || now.address_space_bytes > self.address_space_bytes + LEN_MAX
                || now.resident_bytes > self.resident_bytes + MEMORY / 2
                // The C library keeps stacks, each with a guard, of threads that have ended.
                || now.mappings > self.mappings + 10 * ROUNDS;
            is_left.then(|| println!("{what}: left of {now:?}")).is_none()
        });
    }
}

/// Way of ending a cache.
#[derive(Clone, Copy, Debug)]
enum End {
    Well,
    /// Nothing can be written.
    Unwritten,
    /// Everything is written, but cannot be made durable.
    Unflushed,
    /// Closed with an error, then dropped.
    Unclosed,
    /// A memory file whose swap refuses writes.
    Unswapped,
    /// Pages are referenced for longer than the cache lives.
    Held,
    /// The kernel has lost pages of it.
    Poisoned,
}

const ENDS: [End; 7] = [
    End::Well,
    End::Unwritten,
    End::Unflushed,
    End::Unclosed,
    End::Unswapped,
    End::Held,
    End::Poisoned,
];

fn live_and_end(way: Way, end: End) {
    let storage = Faulty::new(support::Way::Memory, (MEMORY / 8) as usize, 5);
    let builder = storage.builder(MEMORY).reclaim_wait_max(Duration::from_millis(50));
    let is_swapped_out = matches!(end, End::Unswapped);
    let builder =
        if is_swapped_out { builder.swap_backing(storage.backing.clone()) } else { builder };
    let cache = way.mask(builder).build().unwrap();
    let options = way.options().len_max(LEN_MAX);
    let file = if is_swapped_out {
        let file = cache.memory_file_with("mapped", &options).unwrap();
        file.set_len(MEMORY / 8).unwrap();
        file
    } else {
        cache.open_backing(Arc::clone(&storage.backing) as _, &options).unwrap()
    };
    let mut map = file.map_mut(0..file.len()).unwrap();
    // Creates and uses everything that is created on first use.
    map.populate(0..map.len()).unwrap();
    for page in 0..64 {
        store(map.as_mut_ptr(), page * PAGE, b"stored");
    }
    let is_held = matches!(end, End::Held);
    let held = 0..if is_held { 50 } else { 0 };
    let pin = |page| file.pin(page * PAGE..(page + 1) * PAGE).unwrap().into_owned();
    let holds: Vec<_> = held.map(pin).collect();
    match end {
        End::Well => {}
        End::Unwritten | End::Unclosed | End::Held | End::Unswapped => {
            storage.backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
        }
        End::Unflushed => {
            storage.backing.inject(Fault::on(Call::SyncData).forever().fails(libc::EIO));
            storage.backing.inject(Fault::on(Call::SyncAll).forever().fails(libc::EIO));
        }
        End::Poisoned => {
            drop(map);
            let _pipes = break_pipes();
            let outcome = file.evict(0..file.len());
            assert!(file.sync_data().is_err(), "{outcome:?}");
            return;
        }
    }
    drop((map, file));
    if matches!(end, End::Unclosed) {
        cache.close().unwrap_err();
    }
    drop(cache);
    drop(holds);
}

#[test]
fn caches_with_maps_leave_nothing_behind_however_they_end() {
    const NAME: &str = "leaks::caches_with_maps_leave_nothing_behind_however_they_end";
    if std::env::var(VARIABLE).is_err() {
        let output = run_child(NAME, VARIABLE, "1");
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        return assert!(text.contains(END), "{}\n{text}\n{errors}", output.status);
    }
    // SAFETY: it only sets a timer, whose signal ends the process.
    unsafe { libc::alarm(240) };
    // So that what the C library keeps for itself stays as it is.
    for (what, number) in [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, 64 << 10)] {
        // SAFETY: it only says how memory is allocated from now on.
        assert_eq!(unsafe { libc::mallopt(what, number) }, 1);
    }
    for way in Way::whole() {
        for end in ENDS {
            // What is made once for a process.
            live_and_end(way, end);
            let before = Taken::at_rest();
            for _ in 0..ROUNDS {
                live_and_end(way, end);
                // The C library keeps as many stacks as there were threads at once.
                Taken::at_rest();
            }
            before.check_nothing_is_left(&format!("{way:?}, {end:?}"));
        }
    }
    println!("{END}");
}

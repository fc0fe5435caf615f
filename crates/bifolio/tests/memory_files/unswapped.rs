//! The limit of pages that are in memory only, beside a swap that refuses writes: calls that zero
//! parts of swapped pages ask for it like writes do, so that other files keep their pages.

use crate::support::{Faulty, PAGE, Way};
use bifolio::{Cache, Error, ErrorKind, File};
use bifolio_testing::{Call, Fault};
use std::time::Duration;

const MEMORY_BYTES: u64 = 512 << 10;
const PAGES: u64 = 3 * MEMORY_BYTES / PAGE;

/// Fills the swap through `files`, lets it refuse writes, and zeroes a part of each page by `zero`.
/// With `is_full`, the pages of the first file have reached the limit before.
fn check(files: usize, is_full: bool, zero: impl Fn(&File, u64) -> Result<(), Error>) {
    let (swap, disk) = (Faulty::new(Way::Memory, 0, 1), Faulty::new(Way::Memory, 1 << 20, 2));
    let builder = disk.builder(MEMORY_BYTES).swap_backing(swap.backing.clone());
    let cache: Cache = builder.reclaim_wait_max(Duration::from_millis(200)).build().unwrap();
    let files: Vec<File> = (0..files).map(|_| cache.memory_file("scratch").unwrap()).collect();
    let pages_of = |number: usize| if number == 0 { PAGES } else { 4 };
    for (number, file) in files.iter().enumerate().rev() {
        let bytes = vec![number as u8 + 1; (pages_of(number) * PAGE) as usize];
        file.write_all_at(&bytes, 0).unwrap();
    }
    let other = disk.open(&cache);
    swap.backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
    if is_full {
        let is_refused = |page: u64| files[0].write_all_at(&[1], page * PAGE).is_err();
        assert!((0..PAGES).any(is_refused), "{:?}", cache.stats());
    }
    let mut refused = 0;
    for (number, file) in files.iter().enumerate().skip(is_full.into()) {
        for page in (0..pages_of(number)).rev() {
            let Err(error) = zero(file, page) else { continue };
            let kind = error.kind();
            let is_right = matches!(kind, ErrorKind::Unwritable | ErrorKind::Full);
            assert!(is_right, "{error}");
            refused += 1;
            break;
        }
        if refused == 3 {
            break;
        }
    }
    assert!(refused > 0, "all of it fits: {:?}", cache.stats());
    let stats = cache.stats();
    assert!(stats.memory.unswapped_bytes <= MEMORY_BYTES / 16 * 15, "{stats:?}");
    for page in 0..64 {
        let read = other.read_exact_at(&mut [0; 8], page * PAGE);
        read.unwrap_or_else(|error| panic!("{error}: {:?}", cache.stats()));
    }
    // Nothing was lost.
    swap.backing.heal();
    for (number, file) in files.iter().enumerate() {
        for page in 0..file.len() / PAGE {
            let mut byte = [0];
            file.read_exact_at(&mut byte, page * PAGE).unwrap();
            assert_eq!(byte, [number as u8 + 1], "page {page}");
        }
    }
}

#[test]
fn punched_parts_of_pages_take_no_share_of_other_files() {
    check(1, false, |file, page| file.punch_hole(page * PAGE + 1..page * PAGE + 100));
}

#[test]
fn truncated_pages_take_no_share_of_other_files() {
    check(24, true, |file, page| file.set_len(page * PAGE + 100));
}

/// The smallest cache, all of whose pages that memory files may have are in memory only. Another
/// file uses pages that are far apart: each needs a page of the file's table, too.
#[test]
fn other_files_have_pages_beside_those_of_their_tables() {
    let (swap, disk) = (Faulty::new(Way::Memory, 0, 1), Faulty::new(Way::Memory, 8 << 20, 2));
    let builder = disk.builder(256 << 10).swap_backing(swap.backing.clone());
    // As long as an emulated system takes to write all of it out.
    let cache = builder.reclaim_wait_max(Duration::from_millis(2000)).build().unwrap();
    let scratch = cache.memory_file("scratch").unwrap();
    scratch.write_all_at(&vec![1; 1 << 20], 0).unwrap();
    let other = disk.open(&cache);
    swap.backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
    let is_refused = |page: u64| scratch.write_all_at(b"again", page * PAGE).is_err();
    assert!((0..256).any(is_refused), "{:?}", cache.stats());
    let pins: Vec<_> = (0..3).map(|part| other.pin(part << 21..(part << 21) + 8)).collect();
    for pin in &pins {
        assert!(pin.is_ok(), "{pin:?}: {:?}", cache.stats());
    }
    other.read_exact_at(&mut [0; 8], 5 * PAGE).unwrap();
}

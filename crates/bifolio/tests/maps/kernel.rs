//! System calls that use the memory of maps.
//!
//! # Safety
//! The kernel gets addresses inside a map, which lives as long as the call.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;

use bifolio::{Feature, MapMut};
use bifolio_testing::fill_bytes;

use crate::setup::{Way, load};
use crate::support::{PAGE, assert_same, directory, file_of, read_all};

const LENGTH: usize = 8 * PAGE as usize;

fn answer(count: isize) -> Result<usize, Option<i32>> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error().raw_os_error())
}

/// `write(2)` of a whole map to a file.
fn write_out(start: *const u8, to: &std::fs::File) -> Result<usize, Option<i32>> {
    // SAFETY: see the head of the file; the kernel only reads.
    answer(unsafe { libc::pwrite(to.as_raw_fd(), start.cast(), LENGTH, 0) })
}

/// `read(2)` of a file into a map, from its second page on.
fn read_in(map: &mut MapMut, from: &std::fs::File, length: usize) -> Result<usize, Option<i32>> {
    let target = map.as_mut_ptr().wrapping_add(PAGE as usize);
    // SAFETY: see the head of the file; `length` bytes of the map lie there.
    answer(unsafe { libc::pread(from.as_raw_fd(), target.cast(), length, 0) })
}

/// Returns `true` if system calls wait for pages that are not resident.
fn kernel_waits(way: Way) -> bool {
    let reports = bifolio::features();
    let is_there = reports.iter().any(|r| r.feature == Feature::KernelFaults && r.available);
    is_there && way.masked != Some(Feature::KernelFaults) && !way.is_in_thread()
}

#[test]
fn a_system_call_reads_a_map_or_is_refused() {
    for way in Way::with_and_without(Feature::KernelFaults) {
        let directory = directory();
        let bytes = fill_bytes(3, LENGTH);
        let path = file_of(&directory, "mapped", &bytes);
        let target = std::fs::File::create(directory.path().join("target")).unwrap();
        let cache = way.builder(4 << 20).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let map = file.map(0..file.len()).unwrap();
        let expected = if kernel_waits(way) { Ok(LENGTH) } else { Err(Some(libc::EFAULT)) };
        assert_eq!(write_out(map.as_ptr(), &target), expected, "{way:?}");
        map.populate(0..map.len()).unwrap();
        assert_eq!(write_out(map.as_ptr(), &target), Ok(LENGTH), "{way:?}");
        assert_same(&std::fs::read(directory.path().join("target")).unwrap(), &bytes);
        assert!(map.take_error().is_none());
    }
}

#[test]
fn stores_of_a_system_call_in_a_map_are_stores() {
    for way in Way::whole() {
        let directory = directory();
        let mut bytes = fill_bytes(3, LENGTH);
        let new = fill_bytes(4, 3 * PAGE as usize);
        let path = file_of(&directory, "mapped", &bytes);
        let source = std::fs::File::open(file_of(&directory, "source", &new)).unwrap();
        let cache = way.builder(1 << 20).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let mut map = file.map_mut(0..file.len()).unwrap();
        map.populate(0..map.len()).unwrap();
        assert_eq!(read_in(&mut map, &source, new.len()), Ok(new.len()), "{way:?}");
        bytes[PAGE as usize..4 * PAGE as usize].copy_from_slice(&new);
        assert_same(&read_all(&file), &bytes);
        file.sync_data().unwrap();
        assert_same(&std::fs::read(&path).unwrap(), &bytes);
        assert_same(&load(map.as_ptr(), 0..map.len()), &bytes);
    }
}

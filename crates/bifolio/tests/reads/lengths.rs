//! Reads racing with a changing length: appends in small steps, truncations inside a page, runs of
//! pages that are written meanwhile. Each writer writes the bytes before it moves the length out,
//! and moves it in before it changes them; so no reader may ever see a byte that was never in the
//! file.

use crate::support::{cache_of, directory, file_of, read};
use bifolio::{Cache, File, OpenOptions};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const PAGE: u64 = 4096;

/// Creates a memory file and a disk file, both empty, with folios of this size.
fn both_kinds(folio_bytes: u64, check: impl Fn(&File)) {
    let cache: Cache = cache_of(64 << 20);
    let options = OpenOptions::new().read(true).write(true).folio_bytes(folio_bytes);
    check(&cache.memory_file_with("memory", &options).unwrap());
    let directory = directory();
    let path = file_of(&directory, "disk", b"");
    check(&cache.open(&path, &options).unwrap());
}

/// Calls `read` repeatedly until `writer` has ended.
fn against(writer: impl FnOnce() + Send, read: impl Fn() + Sync) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                read();
            }
            read();
        });
        writer();
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
}

#[test]
fn a_reader_never_sees_zeros_before_an_appender() {
    const LEN: u64 = 192 << 10;
    for folio_bytes in [4 << 10, 64 << 10] {
        for step in [100, 1000, 4000] {
            both_kinds(folio_bytes, |file| {
                let append = || {
                    for start in (0..LEN).step_by(step) {
                        let count = (step as u64).min(LEN - start);
                        file.write_all_at(&vec![0xAA; count as usize], start).unwrap();
                    }
                };
                against(append, || {
                    let bytes = read(file, 0, LEN as usize);
                    let wrong = bytes.iter().position(|byte| *byte != 0xAA);
                    assert_eq!(wrong, None, "of {} bytes", bytes.len());
                });
                assert_eq!(read(file, 0, LEN as usize).len(), LEN as usize);
            });
        }
    }
}

/// The file is truncated inside the last page and written again, whole; the bytes past the end are
/// zeros in memory, and never visible to the reader.
fn cut_and_rewritten(length: u64, read_length: u64, position: u64) {
    for folio_bytes in [4 << 10, 64 << 10] {
        both_kinds(folio_bytes, |file| {
            let bytes = vec![0xAA; length as usize];
            file.write_all_at(&bytes, 0).unwrap();
            let change = || {
                for _ in 0..20_000 {
                    file.set_len(length - PAGE + 100).unwrap();
                    file.write_all_at(&bytes[(length - PAGE) as usize..], length - PAGE).unwrap();
                }
            };
            against(change, || {
                let mut bytes = vec![0xAA; read_length as usize];
                let count = file.read_at(&mut bytes, position).unwrap();
                let wrong = bytes[..count].iter().position(|byte| *byte != 0xAA);
                assert_eq!(wrong, None, "of {count} bytes at {position}");
            });
        });
    }
}

#[test]
fn a_cut_inside_a_page_is_never_seen_as_zeros_by_a_hit() {
    cut_and_rewritten(PAGE, 64, 2000);
    cut_and_rewritten(PAGE, PAGE, 0);
    // In two pages, of which the second is cut.
    cut_and_rewritten(2 * PAGE, PAGE, 128);
}

#[test]
fn a_cut_inside_a_page_is_never_seen_as_zeros_by_a_batch() {
    cut_and_rewritten(60 * PAGE, 60 * PAGE, 0);
}

fn check_pages(bytes: &[u8]) {
    for (index, page) in bytes.chunks(PAGE as usize).enumerate() {
        assert!(page.iter().all(|byte| *byte == page[0]), "page {index} is torn");
    }
}

#[test]
fn a_hole_is_not_read_where_there_is_data_or_nothing() {
    const LEN: u64 = 60 * PAGE;
    both_kinds(4 << 10, |file| {
        let change = || {
            for _ in 0..2_000 {
                file.set_len(0).unwrap();
                file.set_len(100).unwrap();
                file.write_all_at(&[0xBB; LEN as usize], 0).unwrap();
            }
        };
        against(change, || {
            for length in [PAGE, LEN] {
                let bytes = read(file, 0, length as usize);
                let wrong = bytes.iter().skip(100).position(|byte| *byte != 0xBB);
                assert_eq!(wrong, None, "of {} bytes", bytes.len());
            }
        });
    });
}

#[test]
fn each_page_of_a_long_read_is_of_one_write() {
    const PAGES: u64 = 80;
    for folio_bytes in [4 << 10, 2 << 20] {
        both_kinds(folio_bytes, |file| {
            let write = |round: u64| {
                for index in 0..PAGES {
                    let page = vec![round as u8; PAGE as usize];
                    file.write_all_at(&page, (index * 7 + round) % PAGES * PAGE).unwrap();
                }
            };
            write(0);
            against(
                || (0..1_000).for_each(write),
                || {
                    let bytes = read(file, 0, (PAGES * PAGE) as usize);
                    assert_eq!(bytes.len() as u64, PAGES * PAGE);
                    check_pages(&bytes);
                    // The first page is cut off, so that the others end where it would.
                    let bytes = read(file, PAGE / 2, (PAGES * PAGE) as usize);
                    check_pages(&bytes[PAGE as usize / 2..]);
                },
            );
        });
    }
}

#[test]
fn both_parts_of_a_read_of_two_pages_are_of_one_write_each() {
    both_kinds(4 << 10, |file| {
        let write = |round: u64| {
            for index in 0..4 {
                let page = vec![round as u8; PAGE as usize];
                file.write_all_at(&page, (index * 3 + round) % 4 * PAGE).unwrap();
            }
        };
        write(0);
        against(
            || (0..10_000).for_each(write),
            || {
                for (start, length) in [(128, PAGE), (2 * PAGE - 9, 400), (2 * PAGE + 7, 8000)] {
                    let bytes = read(file, start, length as usize);
                    assert_eq!(bytes.len() as u64, length);
                    let (head, tail) = bytes.split_at((PAGE - start % PAGE) as usize);
                    check_pages(head);
                    check_pages(tail);
                }
            },
        );
    });
}

#[test]
fn no_read_of_two_pages_sees_another_page_while_they_are_evicted() {
    const PAGES: u64 = 512;
    let directory = directory();
    let page_of = |index: u64| index.to_le_bytes().repeat(PAGE as usize / 8);
    let bytes: Vec<u8> = (0..PAGES).flat_map(page_of).collect();
    let path = file_of(&directory, "file", &bytes);
    // A quarter of the file.
    let cache: Cache = cache_of(512 << 10);
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    let evict = || {
        for _ in 0..5_000 {
            let page = fastrand::u64(0..PAGES);
            file.read_exact_at(&mut [0; 64], page * PAGE).unwrap();
            file.evict(page * PAGE..(page + 1) * PAGE).unwrap();
        }
    };
    against(evict, || {
        // Most of them are hits.
        let start = fastrand::u64(0..20) * PAGE + fastrand::u64(1..PAGE);
        let found = read(&file, start, PAGE as usize);
        assert!(found == bytes[start as usize..][..PAGE as usize], "at {start}");
    });
}

#[test]
fn a_long_read_of_holes_data_and_allocated_pages_is_exact() {
    for folio_bytes in [4 << 10, 64 << 10] {
        let cache = cache_of(64 << 20);
        let options = OpenOptions::new().read(true).write(true).folio_bytes(folio_bytes);
        let file = cache.memory_file_with("mixed", &options).unwrap();
        let length = 8 << 20;
        file.set_len(length + 10).unwrap();
        let mut expected = vec![0; length as usize + 10];
        let mut put = |position: u64, bytes: &[u8]| {
            file.write_all_at(bytes, position).unwrap();
            expected[position as usize..][..bytes.len()].copy_from_slice(bytes);
        };
        for (number, position) in (0..length).step_by(300_001).enumerate() {
            put(position, &vec![number as u8 + 1; 9000]);
        }
        put(length, b"the end");
        file.allocate(1 << 20..3 << 20).unwrap();
        for (position, count) in [(0, 9 << 20), (5, 4096), (299_000, 70_000), (1 << 20, 1 << 20)] {
            let end = expected.len().min(position + count);
            assert!(read(&file, position as u64, count) == expected[position..end]);
        }
    }
}

#[test]
fn a_read_of_a_growing_page_is_of_one_write() {
    both_kinds(4 << 10, |file| {
        let change = || {
            for _ in 0..20_000 {
                file.set_len(0).unwrap();
                file.write_all_at(&[0xAA; 100], 0).unwrap();
                file.write_all_at(&[0xBB; PAGE as usize], 0).unwrap();
            }
        };
        against(change, || {
            let mut bytes = [0; PAGE as usize];
            let exactly = file.read_exact_at(&mut bytes, 0).is_ok();
            assert!(!exactly || bytes == [0xBB; PAGE as usize], "a mixture of writes");
            let bytes = read(file, 0, PAGE as usize);
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a mixture of writes");
        });
    });
}

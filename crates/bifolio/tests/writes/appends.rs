//! Appends.

use bifolio::{Cache, File, OpenOptions};
use std::sync::atomic::{AtomicBool, Ordering};

fn memory_file(bytes: &[u8]) -> File {
    let cache = Cache::builder().memory(1 << 20).build().unwrap();
    let file = cache.memory_file("appends").unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

#[test]
fn concurrent_appends_get_ranges_of_their_own() {
    const THREADS: u8 = 4;
    const RECORDS: usize = 200;
    let file = memory_file(b"");
    let record = |thread: u8| vec![thread; 700 + usize::from(thread)];
    std::thread::scope(|scope| {
        for thread in 1..=THREADS {
            let file = &file;
            scope.spawn(move || {
                for _ in 0..RECORDS {
                    let at = file.append(&record(thread)).unwrap();
                    let mut back = record(0);
                    back.resize(record(thread).len(), 0);
                    file.read_exact_at(&mut back, at).unwrap();
                    assert_eq!(back, record(thread));
                }
            });
        }
    });
    let total: usize = (1..=THREADS).map(|thread| record(thread).len() * RECORDS).sum();
    assert_eq!(file.len(), total as u64, "no gap and no overlap");
}

#[test]
fn an_append_that_fails_leaves_the_length() {
    let cache = Cache::builder().memory(1 << 20).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).len_max(8 << 20);
    let file = cache.memory_file_with("too long", &options).unwrap();
    file.append(b"kept").unwrap();
    // More than the bound, and there is no swap.
    let error = file.append(&vec![1; 4 << 20]).unwrap_err();
    assert_eq!(file.len(), 4, "{error}");
    let error = file.append(&vec![1; 9 << 20]).unwrap_err();
    assert_eq!(error.errno(), libc::EFBIG);
    assert_eq!(file.append(b"next").unwrap(), 4);
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"keptnext");
}

#[test]
fn readers_meet_no_gap_while_a_thread_appends() {
    let file = memory_file(b"");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..100 {
                file.append(&[7; 5000]).unwrap();
            }
            is_over.store(true, Ordering::Release);
        });
        while !is_over.load(Ordering::Acquire) {
            let len_bytes = file.len();
            let start = len_bytes.saturating_sub(5000);
            let mut tail = vec![0; (len_bytes - start) as usize];
            file.read_exact_at(&mut tail, start).unwrap();
            assert!(tail.iter().all(|byte| *byte == 7), "zeros before {len_bytes}");
        }
    });
}

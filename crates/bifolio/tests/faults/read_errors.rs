//! Effects of a read that fails or ends early, and of a descriptor that accepts nothing.

use std::sync::Arc;
use std::thread;

use crate::support::{PAGE, cache_of, error_of, read_all, writable};
use bifolio::{ErrorKind, OpenOptions, ReadRequest};
use bifolio_testing::{Call, Fault, FaultyBacking, MemoryBacking, filter};

/// Bytes in the caller's buffer before a read, and in other files.
const BEFORE: u8 = 0x55;
const FOREIGN: u8 = 0xAA;

fn is_untouched_or_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == BEFORE || *byte == 0)
}

#[test]
fn a_read_that_fails_shows_no_bytes_of_other_files() {
    let cache = cache_of(1 << 20);
    let other = Arc::new(MemoryBacking::new(vec![FOREIGN; 1 << 20]));
    let other = cache.open_backing(other, &OpenOptions::new()).unwrap();
    // All frames there are.
    assert_eq!(read_all(&other).len(), 1 << 20);
    let memory = Arc::new(MemoryBacking::new(vec![7; 64 << 10]));
    let backing = Arc::new(FaultyBacking::over(memory));
    backing.inject(Fault::on(Call::Read).forever());
    let file = cache.open_backing(backing, &writable()).unwrap();
    for (position, length) in [(0, 8), (100, 100), (4096, 4096), (5000, 20_000)] {
        let mut buffer = vec![BEFORE; length];
        error_of(file.read_at(&mut buffer, position), &[]);
        assert!(is_untouched_or_zero(&buffer), "{position}, {length}");
        buffer.fill(BEFORE);
        error_of(file.read_exact_at(&mut buffer, position), &[]);
        assert!(is_untouched_or_zero(&buffer), "{position}, {length}");
        buffer.fill(BEFORE);
        let mut requests = [ReadRequest::new(position, &mut buffer)];
        file.read_many(&mut requests).unwrap();
        assert!(requests[0].result.is_err());
        assert!(is_untouched_or_zero(&buffer), "{position}, {length}");
    }
    // Behind the end, too, and behind what was read.
    let mut buffer = [BEFORE; 300];
    assert_eq!(file.read_at(&mut buffer, 64 << 10).unwrap(), 0);
    assert!(is_untouched_or_zero(&buffer));
    file.write_all_at(&[7; PAGE as usize], 0).unwrap();
    let mut buffer = vec![BEFORE; 2 * PAGE as usize];
    assert_eq!(file.read_at(&mut buffer, 0).unwrap(), PAGE as usize);
    assert!(is_untouched_or_zero(&buffer[PAGE as usize..]));
    cache.close().ok();
    buffer.truncate(100);
    buffer.fill(BEFORE);
    error_of(other.read_at(&mut buffer, 1 << 30), &[]);
    assert!(is_untouched_or_zero(&buffer));
}

#[test]
fn a_descriptor_that_takes_nothing_is_an_error_and_no_loop() {
    let filtered = thread::spawn(|| {
        let cache = cache_of(1 << 20);
        let file = cache.memory_file("scratch").unwrap();
        file.write_all_at(&[7; 10_000], 0).unwrap();
        let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
        // It returns 0.
        if !filter::refuse(libc::SYS_writev, 0) {
            return;
        }
        let error = error_of(file.copy_to_fd(0..10_000, &null), &["scratch"]);
        assert_eq!((error.kind(), error.range()), (ErrorKind::CopyToFd, Some(0..10_000)));
        assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::WriteZero);
    });
    filtered.join().unwrap();
}

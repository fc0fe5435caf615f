//! Effects of a read that fails or ends early.

use std::sync::Arc;

use crate::support::{PAGE, cache_of, error_of, read_all, writable};
use bifolio::{OpenOptions, ReadRequest};
use bifolio_testing::{Call, Fault, FaultyBacking, MemoryBacking};

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
        let mut requests = [ReadRequest::new(&mut buffer, position)];
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

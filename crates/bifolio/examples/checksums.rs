//! Checksums: each page of a file ends with a CRC of its other bytes and its position. A page that
//! another program has damaged is an error, with file and position. Then the speed of misses with
//! and without it.
//!
//! `cargo run --release --example checksums`

use bifolio::{Access, Cache, ErrorKind, OpenOptions, PageCodec, ReadRequest};
use std::error::Error;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 4096;
/// Bytes of a page that the program uses.
const USED_BYTES: usize = PAGE_BYTES - 4;

struct Checksums;

fn sum_of(position: u64, used: &[u8]) -> [u8; 4] {
    let mut sum = crc32fast::Hasher::new();
    sum.update(&position.to_le_bytes());
    sum.update(used);
    sum.finalize().to_le_bytes()
}

impl PageCodec for Checksums {
    fn check(&self, position: u64, page: &mut [u8]) -> io::Result<()> {
        let (used, sum) = page.split_at(USED_BYTES);
        // A page that was never written, of a file that grew.
        let is_new = sum == [0; 4] && used.iter().all(|byte| *byte == 0);
        if is_new || sum == sum_of(position, used) {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "its checksum is wrong"))
    }

    fn seal(&self, position: u64, page: &mut [u8]) -> io::Result<()> {
        let (used, sum) = page.split_at_mut(USED_BYTES);
        sum.copy_from_slice(&sum_of(position, used));
        Ok(())
    }
}

/// Prints how many random pages are read in a second that are not in memory, without and with
/// checksums.
fn time_misses(directory: &Path) -> Result<(), Box<dyn Error>> {
    const CACHE_BYTES: u64 = 8 << 20;
    const PAGES: u64 = 8 * CACHE_BYTES / PAGE_BYTES as u64;
    const BATCH: usize = 64;
    let plain = OpenOptions::new().write(true).create(true);
    let kinds = [("without", plain.clone()), ("with", plain.codec(Arc::new(Checksums)))];
    let mut files = Vec::new();
    for (name, options) in kinds {
        let cache = Cache::builder().memory(CACHE_BYTES).build()?;
        let file = cache.open(directory.join(name), &options)?;
        let mut page = vec![7; PAGE_BYTES];
        page[USED_BYTES..].fill(0);
        (0..PAGES).try_for_each(|index| file.write_all_at(&page, index * PAGE_BYTES as u64))?;
        file.sync_data()?;
        file.set_access(Access::Random);
        files.push((name, file));
    }
    let mut number = 1_u64;
    let mut buffer = vec![0; BATCH * PAGE_BYTES];
    for _ in 0..3 {
        for (name, file) in &files {
            let (begun, mut done) = (Instant::now(), 0.0);
            while begun.elapsed() < Duration::from_secs(2) {
                let mut position = || {
                    number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (number >> 33) % PAGES * PAGE_BYTES as u64
                };
                let pages = buffer.chunks_exact_mut(PAGE_BYTES);
                let mut requests: Vec<_> =
                    pages.map(|page| ReadRequest::new(page, position())).collect();
                file.read_many(&mut requests)?;
                for request in requests {
                    assert_eq!(request.result?, PAGE_BYTES);
                }
                done += BATCH as f64;
            }
            println!("{name} checksums: {:.0} pages/s", done / begun.elapsed().as_secs_f64());
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir_in(std::env::current_dir()?)?;
    let path = directory.path().join("data");
    let cache = Cache::builder().memory(4 << 20).build()?;
    let options = OpenOptions::new().write(true).create(true).codec(Arc::new(Checksums));
    let file = cache.open(&path, &options)?;
    for page in 0..16_u8 {
        let mut bytes = vec![page; USED_BYTES];
        bytes.resize(PAGE_BYTES, 0);
        file.write_all_at(&bytes, u64::from(page) * PAGE_BYTES as u64)?;
    }
    file.close()?;

    // One bit of the sixth page.
    let damaged = std::fs::OpenOptions::new().write(true).open(&path)?;
    damaged.write_all_at(&[5 ^ 16], 5 * PAGE_BYTES as u64 + 100)?;

    let file = cache.open(&path, &options)?;
    for page in 0..16 {
        let mut bytes = [0; USED_BYTES];
        match file.read_exact_at(&mut bytes, page * PAGE_BYTES as u64) {
            Ok(()) => assert_eq!(bytes, [page as u8; USED_BYTES]),
            Err(error) => {
                assert!(page == 5 && error.kind() == ErrorKind::CorruptPage);
                println!("{error}");
            }
        }
    }
    time_misses(directory.path())
}

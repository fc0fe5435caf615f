//! Comparison of every byte that a series reads with an independent read of the file.
//!
//! Run before anything is timed, by several threads, which take one page after the other. The cache
//! was filled before (`fill`): every page is in the state in which a timed read finds it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use super::pattern::{self, CHUNK_BYTES};
use super::permutation::Permutation;
use super::timed::{Block, ReadPath, Reader};
use crate::error::{Error, Result};

/// Bytes that a thread takes at a time.
const WORK_BYTES: usize = 4096;

/// Reads all of `file` through its cache, in order, like a scan, and compares it with the pattern.
/// Returns the number of bytes.
pub(crate) fn fill(file: &bifolio::File, series: &str) -> Result<u64> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut pos_bytes = 0;
    loop {
        let read = file.read_at(&mut chunk, pos_bytes)?;
        if read == 0 {
            return Ok(pos_bytes);
        }
        if !pattern::matches(&chunk[..read], pos_bytes) {
            return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
        }
        pos_bytes += read as u64;
    }
}

/// Fills the file like [`fill`], page by page in random order. It has `size_bytes`, whole pages.
pub(crate) fn fill_shuffled(file: &bifolio::File, size_bytes: u64, series: &str) -> Result<u64> {
    let pages = size_bytes / WORK_BYTES as u64;
    let order = Permutation::new(pages, 1);
    let mut page = [0; WORK_BYTES];
    for index in 0..pages {
        let pos_bytes = order.apply(index) * WORK_BYTES as u64;
        file.read_exact_at(&mut page, pos_bytes)?;
        if !pattern::matches(&page, pos_bytes) {
            return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
        }
    }
    Ok(size_bytes)
}

/// Compares the first `limit_bytes` of `file`, block by block. Returns the number of bytes
/// compared.
pub(crate) fn verify<const BLOCK: usize, P: ReadPath>(
    path: &P,
    series: &str,
    file: &Path,
    limit_bytes: u64,
    threads: usize,
) -> Result<u64> {
    let open = || File::open(file).map_err(Error::system(format!("open {}", file.display())));
    let metadata = open()?.metadata().map_err(Error::system("ask for the size of the file"))?;
    let end_bytes = metadata.len().min(limit_bytes) / BLOCK as u64 * BLOCK as u64;
    let next_work = AtomicU64::new(0);
    let work = || -> Result<()> {
        let file = open()?;
        let mut reader = path.reader()?;
        let mut expected = vec![0; WORK_BYTES];
        loop {
            // Relaxed: hands out numbers, publishes nothing.
            let start = next_work.fetch_add(WORK_BYTES as u64, Ordering::Relaxed);
            if start >= end_bytes {
                return Ok(());
            }
            let work_bytes = (end_bytes - start).min(WORK_BYTES as u64) as usize;
            let expected = &mut expected[..work_bytes];
            file.read_exact_at(expected, start).map_err(Error::system("read the file"))?;
            compare::<BLOCK, _>(&mut reader, series, expected, start)?;
        }
    };
    thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        handles.into_iter().try_for_each(|handle| handle.join().expect("a worker panicked"))
    })?;
    Ok(end_bytes)
}

fn compare<const BLOCK: usize, R: Reader>(
    reader: &mut R,
    series: &str,
    expected: &[u8],
    start_bytes: u64,
) -> Result<()> {
    let mut block = Block([0; BLOCK]);
    let positions = (start_bytes..).step_by(BLOCK);
    for (expected, pos_bytes) in expected.chunks_exact(BLOCK).zip(positions) {
        // Nothing of the last block may pass for this one.
        block.0.fill(!expected[0]);
        let read = reader.read(&mut block.0, pos_bytes).map_err(Into::into)?;
        let same = block.0.iter().zip(expected).position(|(ours, theirs)| ours != theirs);
        if read != BLOCK || same.is_some() {
            let pos_bytes = pos_bytes + same.unwrap_or(read) as u64;
            return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    /// Returns the pattern, except for one byte, and stops before `end_bytes`.
    struct Source {
        wrong_at_bytes: u64,
        end_bytes: u64,
    }

    impl ReadPath for Source {
        type Reader = (u64, u64);
        const SYSCALLS_PER_READ: Option<u64> = Some(0);

        fn reader(&self) -> Result<Self::Reader> {
            Ok((self.wrong_at_bytes, self.end_bytes))
        }
    }

    impl Reader for (u64, u64) {
        type Failure = Error;

        fn read<const BLOCK: usize>(
            &mut self,
            block: &mut [u8; BLOCK],
            pos_bytes: u64,
        ) -> Result<usize> {
            pattern::fill(block, pos_bytes);
            if let Some(byte) = self.0.checked_sub(pos_bytes).filter(|&at| at < BLOCK as u64) {
                block[byte as usize] ^= 0x10;
            }
            Ok(BLOCK.min((self.1 - pos_bytes) as usize))
        }
    }

    #[test]
    fn filling_reads_all_of_a_file_with_the_pattern() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let size_bytes = CHUNK_BYTES as u64 + 4096;
        pattern::make_file(&path, size_bytes, &mut Silent).unwrap();
        let read = || {
            let cache = bifolio::Cache::builder().memory(4 << 20).build().unwrap();
            fill(&cache.open(&path, &bifolio::OpenOptions::new()).unwrap(), "s")
        };
        assert_eq!(read().unwrap(), size_bytes);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[1; 8], size_bytes - 8).unwrap();
        assert!(matches!(read(), Err(Error::WrongBytes { .. })));
    }

    #[test]
    fn finds_the_one_wrong_byte_and_the_short_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        let size_bytes = 3 * CHUNK_BYTES as u64 + 4096;
        pattern::make_file(&file, size_bytes, &mut Silent).unwrap();
        let run = |wrong_at_bytes, end_bytes| {
            verify::<4096, _>(&Source { wrong_at_bytes, end_bytes }, "s", &file, u64::MAX, 3)
        };
        assert_eq!(run(u64::MAX, size_bytes).unwrap(), size_bytes);
        let wrong = size_bytes - 7;
        assert!(matches!(
            run(wrong, size_bytes),
            Err(Error::WrongBytes { pos_bytes, .. }) if pos_bytes == wrong
        ));
        assert!(matches!(
            run(u64::MAX, size_bytes - 10),
            Err(Error::WrongBytes { pos_bytes, .. }) if pos_bytes == size_bytes - 10
        ));
    }
}

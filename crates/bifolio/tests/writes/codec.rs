//! Page codecs: what storage has, what readers see, pages that are refused, and lengths.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::{
    PAGE, SMALL_FOLIO_SIZES, assert_same, cache_of, directory, error_of, file_of, read_all,
    writable,
};
use bifolio::{Cache, ErrorKind, Feature, OpenOptions, PageCodec};
use bifolio_testing::{Call, Fault, FaultyBacking, MemoryBacking, block_on, fill_bytes};
use chacha20poly1305::ChaCha20Poly1305;
use chacha20poly1305::aead::{AeadInPlace, KeyInit};
use fastrand::Rng;

/// Bytes at the end of a page that the codec uses.
const TAIL: usize = 8;

/// Changes all bytes of a page by a key that depends on the position, and ends it with a checksum.
#[derive(Default)]
struct Cipher {
    checked: AtomicU64,
    sealed: AtomicU64,
    /// Position whose pages cannot be sealed, plus 1.
    refuses: AtomicU64,
    /// Position whose pages make it panic, plus 1.
    panics: AtomicU64,
}

fn sum_of(position: u64, bytes: &[u8]) -> [u8; TAIL] {
    let sum = bytes
        .iter()
        .fold(position | 1, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3));
    sum.to_le_bytes()
}

fn change(position: u64, bytes: &mut [u8]) {
    for (number, byte) in bytes.iter_mut().enumerate() {
        *byte ^= (position as u8).wrapping_add((position >> 12) as u8) ^ number as u8 ^ 0x5A;
    }
}

impl PageCodec for Cipher {
    fn check(&self, position: u64, page: &mut [u8]) -> io::Result<()> {
        self.checked.fetch_add(1, Ordering::Relaxed);
        assert_ne!(self.panics.load(Ordering::Relaxed), position + 1, "a codec that panics");
        if page.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let at = page.len() - TAIL;
        let (bytes, sum) = page.split_at_mut(at);
        if sum_of(position, bytes) != *sum {
            return Err(io::Error::other("the sum is wrong"));
        }
        change(position, bytes);
        sum.fill(0);
        Ok(())
    }

    fn seal(&self, position: u64, page: &mut [u8]) -> io::Result<()> {
        self.sealed.fetch_add(1, Ordering::Relaxed);
        if self.refuses.load(Ordering::Relaxed) == position + 1 {
            return Err(io::Error::other("no key"));
        }
        let at = page.len() - TAIL;
        let (bytes, sum) = page.split_at_mut(at);
        change(position, bytes);
        sum.copy_from_slice(&sum_of(position, bytes));
        Ok(())
    }
}

/// Bytes whose pages end with zeros, which the codec uses.
fn pages(seed: u64, folio_bytes: u64, count: u64) -> Vec<u8> {
    let mut bytes = fill_bytes(seed, (folio_bytes * count) as usize);
    bytes.chunks_mut(folio_bytes as usize).for_each(|page| {
        let start = page.len() - TAIL;
        page[start..].fill(0);
    });
    bytes
}

#[test]
fn storage_has_sealed_pages_and_readers_see_their_bytes() {
    for folio_bytes in SMALL_FOLIO_SIZES {
        for disabled in [None, Some(Feature::IoUring)] {
            let directory = directory();
            let path = directory.path().join("file");
            let builder = Cache::builder().memory((8 * folio_bytes).max(1 << 20));
            let builder = disabled.into_iter().fold(builder, |builder, off| builder.disable(off));
            let cache = builder.build().unwrap();
            let codec = Arc::new(Cipher::default());
            let options = writable().create(true).folio_bytes(folio_bytes).codec(codec.clone());
            let file = cache.open(&path, &options).unwrap();
            // More than the cache has, so that most pages are written and read again.
            let count = 3 * (8 * folio_bytes).max(1 << 20) / folio_bytes;
            let mut model = pages(5, folio_bytes, count);
            file.write_all_at(&model, 0).unwrap();
            let mut random = Rng::with_seed(7);
            for _ in 0..200 {
                let page = random.u64(..count) * folio_bytes;
                let at = (page + random.u64(..folio_bytes - 200)) as usize;
                let bytes = fill_bytes(random.u64(..), random.usize(1..180));
                if random.bool() {
                    file.write_all_at(&bytes, at as u64).unwrap();
                } else {
                    block_on(file.write_async(bytes.clone(), at as u64)).unwrap();
                }
                model[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            assert_same(&read_all(&file), &model);
            file.sync_data().unwrap();
            let stored = std::fs::read(&path).unwrap();
            for (number, (stored, page)) in stored
                .chunks(folio_bytes as usize)
                .zip(model.chunks(folio_bytes as usize))
                .enumerate()
            {
                let mut sealed = page.to_vec();
                codec.seal(number as u64 * folio_bytes, &mut sealed).unwrap();
                assert_same(stored, &sealed);
            }
            assert!(codec.checked.load(Ordering::Relaxed) > count);
            let stats = cache.stats();
            assert!(stats.memory.used_bytes <= stats.memory.bound_bytes);
            if folio_bytes == PAGE {
                let (requests, folios) =
                    (stats.storage.write_requests, stats.storage.written_folios);
                assert!(requests * 2 < folios, "{requests} transfers for {folios} pages");
            }
            file.close().unwrap();
            assert_same(&read_all(&cache.open(&path, &options).unwrap()), &model);
        }
    }
}

#[test]
fn a_page_that_is_refused_is_an_error_and_never_bytes() {
    let directory = directory();
    let codec = Arc::new(Cipher::default());
    let options = writable().codec(codec.clone());
    let model = pages(6, PAGE, 64);
    let mut stored = model.clone();
    for (number, page) in stored.chunks_mut(PAGE as usize).enumerate() {
        codec.seal(number as u64 * PAGE, page).unwrap();
    }
    stored[20 * PAGE as usize + 77] ^= 1;
    // A page that belongs elsewhere.
    let (a, b) = (30 * PAGE as usize, 31 * PAGE as usize);
    stored.copy_within(b..b + PAGE as usize, a);
    let path = file_of(&directory, "file", &stored);
    let cache = cache_of(1 << 20);
    let file = cache.open(&path, &options).unwrap();
    for number in 0..64 {
        let at = number * PAGE;
        let bytes = block_on(file.read_async(vec![0; PAGE as usize], at));
        let mut again = vec![0; PAGE as usize];
        let read = file.read_exact_at(&mut again, at);
        if matches!(number, 20 | 30) {
            let error = error_of(read, &["file", &at.to_string(), "the sum is wrong"]);
            assert_eq!(
                (error.kind(), error.range()),
                (ErrorKind::CorruptPage, Some(at..at + PAGE))
            );
            assert_eq!(io::Error::from(error).kind(), io::ErrorKind::InvalidData);
            assert!(again.iter().all(|byte| *byte == 0), "bytes of a page that was refused");
            error_of(bytes, &["the sum is wrong"]);
            error_of(file.pin(at..at + 8), &["the sum is wrong"]);
            error_of(file.write_at(&[1; 8], at), &["the sum is wrong"]);
        } else {
            read.unwrap();
            assert_same(&again, &model[at as usize..][..PAGE as usize]);
            assert_same(&bytes.unwrap(), &again);
        }
    }
    // The pages before it are read, and a whole write makes it anew.
    assert_eq!(file.read_at(&mut vec![0; 64 * PAGE as usize], 0).unwrap() as u64, 20 * PAGE);
    file.write_all_at(&model[20 * PAGE as usize..][..PAGE as usize], 20 * PAGE).unwrap();
    file.write_all_at(&model[30 * PAGE as usize..][..PAGE as usize], 30 * PAGE).unwrap();
    assert_same(&read_all(&file), &model);
    file.close().unwrap();
    assert_same(&read_all(&cache.open(&path, &options).unwrap()), &model);
}

/// Encrypts pages, with the position as associated data; the nonce and the tag are in the last
/// bytes of the page.
struct Encryption {
    cipher: ChaCha20Poly1305,
    nonces: AtomicU64,
}

impl Encryption {
    const NONCE: usize = 12;
    const TAG: usize = 16;

    fn new(key: [u8; 32]) -> Self {
        Self { cipher: ChaCha20Poly1305::new(&key.into()), nonces: AtomicU64::new(1) }
    }
}

impl PageCodec for Encryption {
    fn check(&self, position: u64, page: &mut [u8]) -> io::Result<()> {
        if page.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let used = page.len() - Self::NONCE - Self::TAG;
        let (used, rest) = page.split_at_mut(used);
        let (nonce, tag) = rest.split_at(Self::NONCE);
        let aad = position.to_le_bytes();
        let opened = self.cipher.decrypt_in_place_detached(nonce.into(), &aad, used, tag.into());
        opened.map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        rest.fill(0);
        Ok(())
    }

    fn seal(&self, position: u64, page: &mut [u8]) -> io::Result<()> {
        let used = page.len() - Self::NONCE - Self::TAG;
        let (used, rest) = page.split_at_mut(used);
        let (nonce, tag) = rest.split_at_mut(Self::NONCE);
        let number = self.nonces.fetch_add(1, Ordering::Relaxed);
        nonce[..8].copy_from_slice(&number.to_le_bytes());
        let aad = position.to_le_bytes();
        let sealed = self.cipher.encrypt_in_place_detached((&*nonce).into(), &aad, used);
        tag.copy_from_slice(&sealed.map_err(|_| io::Error::other("too long"))?);
        Ok(())
    }
}

#[test]
fn pages_are_encrypted_on_storage_and_authenticated() {
    let directory = directory();
    let path = directory.path().join("secrets");
    let options = |key: u8| {
        let codec = Arc::new(Encryption::new([key; 32]));
        writable().create(true).folio_bytes(16 << 10).codec(codec)
    };
    let cache = cache_of(1 << 20);
    let file = cache.open(&path, &options(1)).unwrap();
    file.set_len(4 << 20).unwrap();
    let line = b"only its owner reads this ".repeat(600);
    for page in 0..(4 << 20) / (16 << 10) {
        file.write_all_at(&line, page << 14).unwrap();
    }
    file.close().unwrap();
    let stored = std::fs::read(&path).unwrap();
    let words = stored.windows(8).filter(|bytes| *bytes == b"only its").count();
    assert_eq!(words, 0, "plain text on storage");
    let reopened = cache.open(&path, &options(1)).unwrap();
    let mut found = vec![0; line.len()];
    for page in 0..(4 << 20) / (16 << 10) {
        reopened.read_exact_at(&mut found, page << 14).unwrap();
        assert_same(&found, &line);
    }
    reopened.close().unwrap();
    let stranger = cache.open(&path, &options(2)).unwrap();
    let error = stranger.read_exact_at(&mut found, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CorruptPage, "another key");
}

#[test]
fn a_page_that_cannot_be_sealed_stays_dirty() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![0; 1 << 20])));
    let codec = Arc::new(Cipher::default());
    let cache = cache_of(4 << 20);
    let options = writable().codec(codec.clone());
    let file = cache.open_backing(Arc::clone(&backing) as _, &options).unwrap();
    let model = pages(6, PAGE, 64);
    file.write_all_at(&model, 0).unwrap();
    codec.refuses.store(9 * PAGE + 1, Ordering::Relaxed);
    let error = error_of(file.sync_data(), &["36864", "no key"]);
    assert_eq!(error.kind(), ErrorKind::Writeback);
    assert_eq!(file.residency(..).unwrap().dirty, 1, "all others are written");
    codec.refuses.store(0, Ordering::Relaxed);
    file.sync_data().unwrap();
    assert_eq!(file.residency(..).unwrap().dirty, 0);
    // Storage that fails after the page was sealed: the page is sealed anew, from its own bytes.
    backing.inject(Fault::on(Call::Write).fails(libc::EIO));
    file.write_all_at(&model, 0).unwrap();
    let _ = file.sync_data();
    file.sync_data().unwrap();
    file.evict(..).unwrap();
    assert_same(&read_all(&file)[..model.len()], &model);
}

#[test]
fn a_codec_that_panics_refuses_the_page() {
    let codec = Arc::new(Cipher::default());
    let backing = Arc::new(MemoryBacking::new(vec![0; 1 << 20]));
    let file = cache_of(4 << 20).open_backing(backing, &writable().codec(codec.clone())).unwrap();
    codec.panics.store(3 * PAGE + 1, Ordering::Relaxed);
    error_of(file.read_exact_at(&mut [0; 8], 3 * PAGE), &["panicked"]);
    file.read_exact_at(&mut [0; 8], 4 * PAGE).unwrap();
    codec.panics.store(0, Ordering::Relaxed);
    file.read_exact_at(&mut [0; 8], 3 * PAGE).unwrap();
}

#[test]
fn lengths_are_whole_pages_and_codecs_do_not_mix() {
    let directory = directory();
    let codec: Arc<dyn PageCodec> = Arc::new(Cipher::default());
    let cache = cache_of(1 << 20);
    let options = writable().create(true).codec(Arc::clone(&codec));
    let path = directory.path().join("file");
    let file = cache.open(&path, &options).unwrap();
    for error in [
        file.set_len(100).unwrap_err(),
        file.write_at(&[1; 100], 0).unwrap_err(),
        file.append(&[1; 100]).unwrap_err(),
        block_on(file.write_async(vec![1; 100], PAGE)).unwrap_err(),
        block_on(file.append_async(vec![1; 100])).unwrap_err(),
        file.allocate(..100).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
    assert_eq!(file.len(), 0);
    file.set_len(4 * PAGE).unwrap();
    file.write_at(&[1; 100], 50).unwrap();
    file.sync_data().unwrap();
    // Pages that were never written are zeros, and so are holes.
    file.punch_hole(PAGE..2 * PAGE).unwrap();
    file.evict(..).unwrap();
    let mut expected = vec![0; 4 * PAGE as usize];
    expected[50..150].fill(1);
    assert_same(&read_all(&file), &expected);
    for options in [writable(), writable().codec(Arc::new(Cipher::default()))] {
        let error = cache.open(&path, &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OptionConflict);
    }
    drop(cache.open(&path, &OpenOptions::new().codec(Arc::clone(&codec))).unwrap());
    assert!(cache.memory_file_with("memory", &options).is_err());
    #[cfg(feature = "maps")]
    assert!(cache.open(&path, &options.clone().mappable(true)).is_err());
    let odd = file_of(&directory, "odd", &[1; 100]);
    error_of(cache.open(odd, &options), &["no multiple"]);
}

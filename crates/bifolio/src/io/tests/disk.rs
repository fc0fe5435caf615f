//! Transfers of `DiskFile`, each test run for every way a transfer can go.

use bifolio_testing::skip;
use std::fs;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::ways::*;
use crate::io::transfer::write_full;
use crate::io::*;

const TAILS: [usize; 5] = [1, 511, 512, 513, 4095];

#[test]
fn a_file_with_any_tail_is_written_to_its_exact_length() {
    for way in ways() {
        for whole in [0, BLOCK, 5 * BLOCK] {
            for tail in TAILS {
                let name = format!("{whole}-{tail}");
                let file = way.open(&name);
                let bytes = pattern(whole + tail, tail as u64);
                write(&file, &bytes, 0);
                assert_holds(&way, &file, &name, &bytes);
                file.sync_data().unwrap();
                assert_holds(&way, &file, &name, &bytes);
            }
        }
    }
}

#[test]
fn a_tail_that_grows_in_steps_keeps_every_byte() {
    for way in ways() {
        let file = way.open("f");
        let mut expected = Vec::new();
        for (step, grown_to) in (0..40).map(|step| (step, 1 + step * 777)) {
            // Like the cache: writes the last folio again, from its start, with its new end.
            expected.extend(pattern(grown_to - expected.len(), step as u64));
            let start = (grown_to - 1) / BLOCK * BLOCK;
            let first = start.saturating_sub(BLOCK);
            write(&file, &expected[first..], first as u64);
            assert_holds(&way, &file, "f", &expected);
        }
    }
}

#[test]
fn random_writes_cuts_and_growth_agree_with_a_plain_vector() {
    for (number, way) in ways().into_iter().enumerate() {
        let file = way.open("f");
        let mut random = fastrand_like(number as u64 + 1);
        let mut model: Vec<u8> = Vec::new();
        for step in 0..200 {
            let position = random() as usize % 16 * BLOCK;
            if random().is_multiple_of(5) {
                let length = random() as usize % (16 * BLOCK);
                file.set_len(length as u64).unwrap();
                model.resize(length, 0);
            } else {
                // Whole blocks anywhere; a tail only at the end of file.
                let mut length = (1 + random() as usize % 4) * BLOCK;
                if position + length >= model.len() && random().is_multiple_of(2) {
                    length -= random() as usize % BLOCK;
                    length = length.max(model.len().saturating_sub(position));
                }
                let bytes = pattern(length, step);
                write(&file, &bytes, position as u64);
                model.resize(model.len().max(position + length), 0);
                model[position..position + length].copy_from_slice(&bytes);
            }
            if random().is_multiple_of(8) {
                file.sync_data().unwrap();
            }
            assert_holds(&way, &file, "f", &model);
        }
    }
}

#[test]
fn the_file_is_never_longer_than_requested() {
    const LENGTH: usize = 3 * BLOCK + 513;
    for way in ways() {
        let file = way.open("f");
        let path = way.path("f");
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut longest = 0;
                // Relaxed: only ends the loop.
                while !over.load(Ordering::Relaxed) {
                    longest = longest.max(fs::metadata(&path).unwrap().len());
                }
                longest
            });
            for step in 0..150 {
                if step % 3 == 0 {
                    file.set_len(0).unwrap();
                }
                write(&file, &pattern(LENGTH, step), 0);
            }
            // Relaxed: only ends the loop.
            over.store(true, Ordering::Relaxed);
            let longest = watcher.join().unwrap();
            assert!(longest <= LENGTH as u64, "{}: seen with {longest} bytes", way.name);
        });
    }
}

#[test]
fn each_way_reports_its_route_and_the_reason() {
    let reasons =
        [None, None, Some("not requested"), Some("disabled in this cache"), Some("tmpfs")];
    for (way, reason) in ways().iter().zip(reasons) {
        let file = way.open("f");
        write(&file, &pattern(BLOCK, 1), 0);
        match (file.direct(), reason) {
            (DirectStatus::Buffered { reason }, Some(expected)) => {
                assert!(reason.contains(expected), "{}: {reason}", way.name);
                assert_eq!(file.alignment(), Alignment::NONE);
            }
            (DirectStatus::Direct, None) => assert!(file.alignment().granule_bytes() > 1),
            (other, None) => skip(crate::Feature::DirectIo, format!("{other:?}")),
            (other, Some(_)) => panic!("{}: {other:?}", way.name),
        }
    }
    let guessed = &ways()[1];
    let file = guessed.open("f");
    if file.direct() == DirectStatus::Direct {
        assert_eq!(file.alignment(), Alignment { memory_bytes: 4096, offset_bytes: 4096 });
    }
}

#[test]
fn direct_transfers_use_the_page_cache_only_for_the_tail() {
    let Some((way, file)) = direct_way() else { return };
    let bytes = pattern(64 * BLOCK + 100, 3);
    write(&file, &bytes, 0);
    file.sync_data().unwrap();
    let cached = cached_pages(&way.path("f"));
    assert!(cached <= 1, "{cached} pages of a directly written file are in the page cache");
    assert!(read(&file, 65 * BLOCK, 0) == bytes);
    assert!(cached_pages(&way.path("f")) <= 1);
    let buffered = &ways()[2];
    let file = buffered.open("f");
    write(&file, &bytes, 0);
    assert_eq!(cached_pages(&buffered.path("f")), 65, "the measure itself must see something");
}

#[test]
fn one_call_is_one_transfer_and_the_tail_is_the_second() {
    let Some((way, file)) = direct_way() else { return };
    let block = file.alignment().offset_bytes as usize;
    let bytes = pattern(3 * block + 100, 4);
    let buffer = IoBuffer::from_bytes(&bytes);
    assert_eq!(file.write_at(&buffer.source(), 0).unwrap(), 3 * block);
    assert_eq!(fs::metadata(way.path("f")).unwrap().len() as usize, 3 * block);
    let rest = buffer.source().suffix(3 * block);
    assert_eq!(file.write_at(&rest, 3 * block as u64).unwrap(), 100);
    assert_holds(&way, &file, "f", &bytes);
}

#[test]
fn several_buffers_are_one_transfer_and_their_tail_the_second() {
    for way in ways() {
        let file = way.open("f");
        let bytes = pattern(3 * BLOCK + 700, 10);
        let parts: Vec<_> = bytes.chunks(BLOCK).map(IoBuffer::from_bytes).collect();
        let sources: Vec<_> = parts.iter().map(IoBuffer::source).collect();
        let block = file.alignment().offset_bytes as usize;
        let whole = (3 * BLOCK + 700) / block * block;
        assert_eq!(file.write_vectored_at(&sources, 0).unwrap(), whole, "{}", way.name);
        write_full(&file, &sources, 0, None).unwrap();
        assert_holds(&way, &file, "f", &bytes);
        let mut buffers: Vec<_> = (0..4).map(|_| IoBuffer::new(BLOCK)).collect();
        let mut targets: Vec<_> = buffers.iter_mut().map(IoBuffer::target).collect();
        assert_eq!(file.read_vectored_at(&mut targets, 0).unwrap(), bytes.len());
        let seen: Vec<_> = buffers.iter().flat_map(|buffer| buffer.as_bytes()).copied().collect();
        assert!(seen[..bytes.len()] == bytes, "{}", way.name);
    }
}

#[test]
fn more_buffers_than_the_kernel_accepts_are_a_short_transfer() {
    for way in ways() {
        let file = way.open("f");
        let bytes = pattern(1100 * 512, 11);
        let buffer = IoBuffer::from_bytes(&bytes);
        let buffer = |i: usize| buffer.source().suffix(i * 512).prefix(512);
        let sources: Vec<_> = (0..1100).map(buffer).collect();
        assert_eq!(file.write_vectored_at(&sources, 0).unwrap(), 1024 * 512, "{}", way.name);
        assert_eq!(write_full(&file, &sources, 0, None).unwrap(), bytes.len());
        assert_holds(&way, &file, "f", &bytes);
    }
}

#[test]
fn several_unaligned_buffers_are_transferred() {
    for way in ways() {
        let file = way.open("f");
        write(&file, &pattern(4 * BLOCK, 12), 0);
        let direct = file.direct();
        let bytes = pattern(2 * BLOCK, 13);
        let buffer = IoBuffer::from_bytes(&bytes);
        let (first, second) = (buffer.source().prefix(100), buffer.source().suffix(100));
        assert_eq!(file.write_vectored_at(&[first, second], 0).unwrap(), 2 * BLOCK);
        assert!(read(&file, 2 * BLOCK, 0) == bytes, "{}", way.name);
        assert_eq!(file.direct(), direct, "{}: it was not even to be tried", way.name);
    }
}

#[test]
fn unaligned_transfers_are_transferred() {
    for way in ways() {
        let file = way.open("f");
        let bytes = pattern(3 * BLOCK, 5);
        let mut model = vec![0; 3 * BLOCK];
        write(&file, &model, 0);
        let direct = file.direct();
        let buffer = IoBuffer::from_bytes(&bytes);
        let odd = buffer.source().suffix(1).prefix(BLOCK);
        assert_eq!(file.write_at(&odd, 4096).unwrap(), BLOCK, "{}", way.name);
        model[4096..8192].copy_from_slice(&bytes[1..=BLOCK]);
        let odd = buffer.source().prefix(BLOCK);
        assert_eq!(file.write_at(&odd, 7).unwrap(), BLOCK, "{}", way.name);
        model[7..7 + BLOCK].copy_from_slice(&bytes[..BLOCK]);
        assert_holds(&way, &file, "f", &model);
        let mut target = IoBuffer::new(2 * BLOCK);
        assert_eq!(file.read_at(&mut target.target().suffix(3), 5).unwrap(), 2 * BLOCK - 3);
        assert!(target.as_bytes()[3..] == model[5..2 * BLOCK + 2], "{}", way.name);
        assert_eq!(file.direct(), direct, "{}: it was not even to be tried", way.name);
    }
}

#[test]
fn a_file_truncated_by_another_program_ends_earlier() {
    for way in ways() {
        let file = way.open("f");
        let bytes = pattern(4 * BLOCK, 6);
        write(&file, &bytes, 0);
        let other = fs::File::options().write(true).open(way.path("f")).unwrap();
        other.set_len(2 * BLOCK as u64 + 700).unwrap();
        assert_holds(&way, &file, "f", &bytes[..2 * BLOCK + 700]);
        assert_eq!(read(&file, BLOCK, 3 * BLOCK as u64), [], "{}", way.name);
        other.set_len(0).unwrap();
        assert_holds(&way, &file, "f", &[]);
    }
}

#[test]
fn buffered_writes_of_other_programs_are_seen() {
    for way in ways() {
        let file = way.open("f");
        let mut model = pattern(2 * BLOCK + 9, 7);
        write(&file, &model, 0);
        let mut other = fs::File::options().append(true).open(way.path("f")).unwrap();
        other.write_all(b"more").unwrap();
        model.extend(b"more");
        assert_holds(&way, &file, "f", &model);
    }
}

#[test]
fn a_refused_direct_transfer_makes_the_file_buffered_for_good() {
    let Some((way, file)) = direct_way() else { return };
    let bytes = pattern(2 * BLOCK, 8);
    // A descriptor that refuses: direct transfers of a file whose alignment we got wrong.
    let mut file = file;
    file.assume_alignment(Alignment { memory_bytes: 1, offset_bytes: 1 });
    let buffer = IoBuffer::from_bytes(&bytes);
    let odd = buffer.source().prefix(1000);
    assert_eq!(file.write_at(&odd, 0).unwrap(), 1000);
    let DirectStatus::Buffered { reason } = file.direct() else { panic!("still direct") };
    assert!(reason.contains("refused a direct write"), "{reason}");
    write(&file, &bytes, 0);
    let cached = cached_pages(&way.path("f"));
    assert_eq!(cached, 2, "a later transfer tried again to go directly");
    assert_holds(&way, &file, "f", &bytes);
}

#[test]
fn with_direct_required_a_refused_transfer_is_an_error() {
    let Some((way, file)) = direct_way() else { return };
    drop(file);
    let options = DiskOptions {
        read: true,
        write: true,
        direct: DirectIo::Require,
        ..DiskOptions::default()
    };
    let mut file = DiskFile::open_with(way.path("f"), &options, &way.features).unwrap();
    write(&file, &[2; BLOCK], 0);
    file.assume_alignment(Alignment { memory_bytes: 1, offset_bytes: 1 });
    let buffer = IoBuffer::from_bytes(&[1; 1000]);
    let error = file.write_at(&buffer.source(), 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    assert_eq!(file.direct(), DirectStatus::Direct);
    let error = file.read_at(&mut IoBuffer::new(1000).target(), 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    assert_eq!(fs::read(way.path("f")).unwrap(), [2; BLOCK]);
}

#[test]
fn positions_near_two_to_the_63_are_typed_errors() {
    for way in ways() {
        let file = way.open("f");
        let mut buffer = IoBuffer::new(BLOCK);
        let last = (1 << 63) - BLOCK as u64;
        for error in [
            file.read_at(&mut buffer.target(), last).unwrap_err(),
            file.write_at(&buffer.source(), last).unwrap_err(),
            file.write_at(&buffer.source(), u64::MAX - 4095).unwrap_err(),
            file.set_len(1 << 63).unwrap_err(),
        ] {
            assert!(error.to_string().ends_with("do not end below 2^63"), "{}: {error}", way.name);
        }
        match file.write_at(&buffer.source(), last - BLOCK as u64) {
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EFBIG), "{}", way.name),
            Ok(_) => assert!(is_tmpfs(way.directory.path()), "{}", way.name),
        }
        assert_eq!(file.direct(), way.open("g").direct(), "too big is not a refusal");
    }
}

#[test]
fn after_a_failed_sync_no_later_one_succeeds() {
    let directory = disk_directory();
    let file = read_write(&directory.path().join("f")).unwrap();
    let fail = |_: &std::os::fd::OwnedFd| Err(io::Error::from_raw_os_error(libc::EIO));
    let interrupted = |_: &std::os::fd::OwnedFd| Err(io::Error::from_raw_os_error(libc::EINTR));
    assert!(file.sync_once(interrupted).is_err());
    file.sync_data().unwrap();
    let first = file.sync_once(fail).unwrap_err();
    assert_eq!(first.raw_os_error(), Some(libc::EIO));
    for later in [file.sync_data().unwrap_err(), file.sync_all().unwrap_err()] {
        assert!(later.to_string().starts_with("an earlier sync failed (Input/output error"));
    }
    read_write(&directory.path().join("f")).unwrap().sync_data().unwrap();
}

/// The kernel reports a lost write once per descriptor.
#[test]
fn two_concurrent_syncs_both_report_a_failure() {
    static HAS_LOST: AtomicBool = AtomicBool::new(true);
    let directory = disk_directory();
    let file = &read_write(&directory.path().join("f")).unwrap();
    let tells_once = |_: &std::os::fd::OwnedFd| {
        thread::sleep(std::time::Duration::from_millis(50));
        let lost = HAS_LOST.swap(false, Ordering::Relaxed);
        if lost { Err(io::Error::from_raw_os_error(libc::ENOSPC)) } else { Ok(()) }
    };
    let told = thread::scope(|scope| {
        let syncs = [(); 2].map(|()| scope.spawn(move || file.sync_once(tells_once).is_err()));
        syncs.map(|sync| sync.join().unwrap())
    });
    assert_eq!(told, [true; 2]);
}

#[test]
fn a_full_disk_is_not_mistaken_for_a_refusal() {
    let Some(directory) = small_file_system() else { return };
    let file = read_write(&directory.path().join("f")).unwrap();
    let error = write_full(&file, &[IoBuffer::new(1 << 20).source()], 0, None).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    let missing = error.range().unwrap();
    assert_eq!((missing.start, missing.end), (file.len_bytes().unwrap(), 1 << 20));
}

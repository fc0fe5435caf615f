//! Batches of reads when storage fails: each request has its own result, independent of the others
//! and of the kind of transfer: io_uring, threads, or memory.

use std::ops::Range;
use std::thread;

use crate::support::{
    Faulty, PAGE, Way, assert_same, error_of, for_each_way, read_all, wait_until, writable,
};
use bifolio::{Error, ErrorKind, File, ReadRequest};
use bifolio_testing::{Call, Fault, Gate};

/// Single pages, far from each other: each is a separate transfer.
const REQUESTS: usize = 24;
const STRIDE: u64 = 5 * PAGE;
const LENGTH: usize = REQUESTS * STRIDE as usize;

/// The result of a request, and its bytes.
type Answer = Result<Vec<u8>, Error>;

fn single_pages() -> Vec<Range<u64>> {
    (0..REQUESTS as u64).map(|number| number * STRIDE..number * STRIDE + PAGE).collect()
}

fn pages(range: Range<u64>) -> Range<u64> {
    range.start * PAGE..range.end * PAGE
}

fn read_many(file: &File, ranges: &[Range<u64>]) -> Vec<Answer> {
    let length = |range: &Range<u64>| (range.end - range.start) as usize;
    let mut buffers: Vec<_> = ranges.iter().map(|range| vec![0xEE; length(range)]).collect();
    let pairs = ranges.iter().zip(&mut buffers);
    let mut requests: Vec<_> =
        pairs.map(|(range, buffer)| ReadRequest::new(buffer, range.start)).collect();
    file.read_many(&mut requests).unwrap();
    requests.into_iter().map(answer_of).collect()
}

fn answer_of(request: ReadRequest<'_>) -> Answer {
    let count = request.result?;
    Ok(request.buffer[..count].to_vec())
}

/// Pins the same ranges, and returns copies of their bytes.
fn pin_many(file: &File, ranges: &[Range<u64>]) -> Vec<Answer> {
    let copied = file.pin_many(ranges).into_iter().map(|pin| {
        let pin = pin?;
        let mut bytes = vec![0; pin.len()];
        pin.copy_to(0, &mut bytes).unwrap();
        Ok(bytes)
    });
    copied.collect()
}

/// Returns the numbers of the failed requests, after a check that the others have the file's bytes.
#[track_caller]
fn failures(faulty: &Faulty, ranges: &[Range<u64>], answers: &[Answer]) -> Vec<usize> {
    assert_eq!(answers.len(), ranges.len());
    for (answer, range) in answers.iter().zip(ranges) {
        if let Ok(bytes) = answer {
            assert_same(bytes, &faulty.bytes[range.start as usize..range.end as usize]);
        }
    }
    (0..answers.len()).filter(|number| answers[*number].is_err()).collect()
}

/// Checks that the read of `bytes` failed with the right error.
#[track_caller]
fn assert_read_error(faulty: &Faulty, answer: &Answer, bytes: Range<u64>, errno: i32) {
    let error = answer.as_ref().unwrap_err();
    assert_eq!((error.kind(), error.range()), (ErrorKind::Io, Some(bytes)), "{error}");
    assert!(error.to_string().contains(": read of "), "{error}");
    assert_eq!(error.raw_os_error(), Some(errno), "{error}");
    let name = bifolio::backing::Backing::describe(&*faulty.backing);
    assert_eq!(error.file(), Some(name.as_str()));
}

#[test]
fn the_nth_failed_read_fails_only_its_own_request() {
    for_each_way(LENGTH, |faulty| {
        let ranges = single_pages();
        for (nth, many) in (1..=REQUESTS as u64).zip([read_many, pin_many].into_iter().cycle()) {
            let cache = faulty.builder(4 << 20).io_depth(4).build().unwrap();
            let file = faulty.open(&cache);
            faulty.backing.inject(Fault::on(Call::Read).nth(nth).fails(libc::ENXIO));
            let answers = many(&file, &ranges);
            let failed = failures(faulty, &ranges, &answers);
            assert_eq!(failed.len(), 1, "{failed:?} failed");
            let bad = failed[0];
            assert_read_error(faulty, &answers[bad], ranges[bad].clone(), libc::ENXIO);
            // Nothing is remembered of it, and nothing else is read again.
            let calls = faulty.backing.calls(Call::Read);
            assert!(failures(faulty, &ranges, &many(&file, &ranges)).is_empty());
            assert_eq!(faulty.backing.calls(Call::Read), calls + 1);
        }
    });
}

#[test]
fn bad_places_fail_only_requests_that_need_them() {
    for_each_way(LENGTH, |faulty| {
        let cache = faulty.builder(256 << 10).io_depth(8).build().unwrap();
        let file = faulty.open(&cache);
        // Every page of the file, backwards, in requests of a page: four times what fits.
        let count = LENGTH as u64 / PAGE;
        let ranges: Vec<_> = (0..count).rev().map(|page| pages(page..page + 1)).collect();
        let bad = [0, 7, 8, 50, 119].map(|page: usize| ranges.len() - 1 - page);
        for number in bad {
            let place = Fault::on(Call::Read).at(ranges[number].clone());
            faulty.backing.inject(place.forever().fails(libc::EIO));
        }
        let answers = read_many(&file, &ranges);
        let mut expected = bad.to_vec();
        expected.sort_unstable();
        assert_eq!(failures(faulty, &ranges, &answers), expected);
        for number in bad {
            assert_read_error(faulty, &answers[number], ranges[number].clone(), libc::EIO);
        }
        let stats = cache.stats();
        assert!(
            stats.memory.used_bytes <= stats.memory.bound_bytes
                && stats.memory.allocation_failures == 0
        );
        faulty.backing.heal();
        assert!(failures(faulty, &ranges, &read_many(&file, &ranges)).is_empty());
    });
}

#[test]
fn a_long_request_ends_before_the_bad_page() {
    for folio_pages in [1, 4] {
        for_each_way(LENGTH, |faulty| {
            let cache = faulty.builder(4 << 20).build().unwrap();
            let options = writable().folio_bytes(folio_pages * PAGE);
            let file = cache.open_backing(faulty.backing.clone(), &options).unwrap();
            let bad = pages(42..43);
            faulty.backing.inject(Fault::on(Call::Read).at(bad).forever().fails(libc::EIO));
            let folio = 42 / folio_pages * folio_pages;
            let failed = pages(folio..folio + folio_pages);
            let ranges = [
                pages(42..43),
                pages(10..20),
                pages(30..60),
                pages(44..47),
                pages(39..43),
                pages(42..43),
                failed.start + 10..failed.end,
                pages(0..1),
            ];
            let answers = read_many(&file, &ranges);
            for number in [0, 5, 6] {
                assert_read_error(faulty, &answers[number], failed.clone(), libc::EIO);
            }
            for number in [1, 2, 3, 4, 7] {
                let Range { start, end } = ranges[number];
                let end = if start < failed.start { end.min(failed.start) } else { end };
                let expected = &faulty.bytes[start as usize..end as usize];
                assert_same(answers[number].as_ref().unwrap(), expected);
            }
        });
    }
}

#[test]
fn short_interrupted_and_refused_reads_of_a_batch_are_continued() {
    for_each_way(LENGTH, |faulty| {
        let cache = faulty.builder(4 << 20).build().unwrap();
        let file = faulty.open(&cache);
        let mut ranges = single_pages();
        ranges[3].end += 3 * PAGE;
        let place = |number: usize| Fault::on(Call::Read).at(ranges[number].clone());
        faulty.backing.inject(place(0).short_by(1000));
        faulty.backing.inject(place(2).times(3).fails(libc::EINTR));
        faulty.backing.inject(place(3).times(2).short_by(5000));
        faulty.backing.inject(place(4).times(2).fails(libc::EAGAIN));
        faulty.backing.inject(place(5).fails(libc::EINTR));
        faulty.backing.inject(place(5).nth(2).short_by(4000));
        faulty.backing.inject(place(5).nth(3).fails(libc::EAGAIN));
        let struck = faulty.backing.struck();
        assert!(failures(faulty, &ranges, &read_many(&file, &ranges)).is_empty());
        assert_eq!(faulty.backing.struck() - struck, 11);
        assert_eq!(cache.stats().reads.misses, REQUESTS as u64 + 3, "a page was read again");
    });
}

#[test]
fn transfers_end_in_any_order_and_each_byte_is_read_once() {
    // A request of four transfers, and some of one each.
    let long = pages(0..1024);
    for_each_way(8 << 20, |faulty| {
        let cache = faulty.builder(16 << 20).build().unwrap();
        let file = faulty.open(&cache);
        let gates = [Gate::new(), Gate::new(), Gate::new()];
        let held = [pages(0..1), pages(512..513), pages(1500..1501)];
        for (gate, place) in gates.iter().zip(&held) {
            faulty.backing.inject(Fault::on(Call::Read).at(place.clone()).held(gate));
        }
        let singles = (1100..1800).step_by(100).map(|page| pages(page..page + 1));
        let ranges: Vec<_> = [long.clone()].into_iter().chain(singles).collect();
        thread::scope(|scope| {
            let reader = scope.spawn(|| read_many(&file, &ranges));
            gates.iter().for_each(|gate| gate.wait_for_arrivals(1));
            let mut is_early = false;
            for gate in gates.iter().rev() {
                is_early |= reader.is_finished();
                gate.open();
            }
            assert!(!is_early, "it did not wait for a transfer that is held");
            assert!(failures(faulty, &ranges, &reader.join().unwrap()).is_empty());
        });
        let stats = cache.stats();
        assert_eq!((stats.reads.misses, stats.storage.read_bytes), (1024 + 7, (1024 + 7) * PAGE));
        assert_eq!(faulty.backing.calls(Call::Read), 4 + 7);
    });
}

#[test]
fn the_end_of_the_file_may_be_anywhere_in_a_transfer() {
    for beyond in [1, 511, 512, 777, 4095] {
        let length = 50 * PAGE + beyond;
        for_each_way(length as usize, |faulty| {
            let cache = faulty.builder(256 << 10).build().unwrap();
            let file = faulty.open(&cache);
            // Every frame has held something else before.
            let other = Faulty::new(Way::Memory, 1 << 20, 3);
            assert_same(&read_all(&other.open(&cache)), &other.bytes);
            let tail = 50 * PAGE..length;
            faulty.backing.inject(Fault::on(Call::Read).at(tail.clone()).short_by(300));
            faulty.backing.inject(Fault::on(Call::Read).at(tail).nth(2).fails(libc::EINTR));
            let ranges =
                [pages(45..60), pages(0..3), pages(50..51), pages(70..71), length - 1..length + 9];
            let answers = read_many(&file, &ranges);
            for (answer, range) in answers.iter().zip(&ranges) {
                let clip = |position: u64| position.min(length) as usize;
                let expected = &faulty.bytes[clip(range.start)..clip(range.end)];
                assert_same(answer.as_ref().unwrap(), expected);
            }
            // Behind the end there are zeros, and not what the frame held before.
            file.set_len(51 * PAGE).unwrap();
            let behind = crate::support::read(&file, length, PAGE as usize);
            assert_same(&behind, &vec![0; (PAGE - beyond) as usize]);
        });
    }
}

#[test]
fn a_file_truncated_by_others_fails_only_lost_requests() {
    for_each_way(LENGTH, |faulty| {
        let cache = faulty.builder(4 << 20).build().unwrap();
        let file = faulty.open(&cache);
        let end = 60 * PAGE + 100;
        faulty.set_len_from_outside(end);
        let ranges = [
            pages(60..61),
            pages(0..1),
            pages(55..70),
            pages(80..81),
            pages(57..60),
            pages(20..22),
            pages(90..99),
        ];
        let answers = read_many(&file, &ranges);
        let got = |answer: &Answer| match answer {
            Ok(bytes) => Ok(bytes.len() as u64),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::CutShort, "{error:?}");
                let (range, text) = (error.range().unwrap(), error.to_string());
                let (_, got) = text.split_once(&format!("position {}, ", range.start)).unwrap();
                let (got, _) = got.split_once(" found").unwrap();
                Err((range.start / PAGE, range.end - range.start, got.parse::<u64>().unwrap()))
            }
        };
        let found: Vec<_> = answers.iter().map(got).collect();
        let expected = [
            Err((60, PAGE, 100)),
            Ok(PAGE),
            // Up to the page that is not whole.
            Ok(5 * PAGE),
            Err((80, PAGE, 0)),
            Ok(3 * PAGE),
            Ok(2 * PAGE),
            Err((90, PAGE, 0)),
        ];
        assert_eq!(found, expected);
        for (answer, range) in answers.iter().zip(&ranges) {
            let bytes = answer.as_deref().unwrap_or_default();
            assert_same(bytes, &faulty.bytes[range.start as usize..][..bytes.len()]);
        }
        let pins = pin_many(&file, &[pages(81..82), pages(1..2), pages(82..83)]);
        let found: Vec<_> = pins.iter().map(got).collect();
        assert_eq!(found, [Err((81, PAGE, 0)), Ok(PAGE), Err((82, PAGE, 0))]);
        // Once there are bytes again, they are read.
        faulty.set_len_from_outside(LENGTH as u64);
        let mut expected = faulty.bytes.clone();
        expected[end as usize..].fill(0);
        assert_same(&read_all(&file), &expected);
    });
}

#[test]
fn requests_under_way_end_where_the_file_is_truncated() {
    for_each_way(LENGTH, |faulty| {
        for many in [read_many, pin_many] {
            faulty.set_len_from_outside(LENGTH as u64);
            let cache = faulty.builder(4 << 20).build().unwrap();
            let file = faulty.open(&cache);
            file.write_all_at(&faulty.bytes, 0).unwrap();
            drop(file);
            let file = faulty.open(&cache);
            let gate = Gate::new();
            let ranges = single_pages();
            for range in &ranges[10..12] {
                faulty.backing.inject(Fault::on(Call::Read).at(range.clone()).held(&gate));
            }
            let end = ranges[11].start + 100;
            let answers = thread::scope(|scope| {
                let reader = scope.spawn(|| many(&file, &ranges));
                gate.wait_for_arrivals(2);
                let cut = scope.spawn(|| file.set_len(end));
                wait_until("the device is cut", || faulty.stored().len() as u64 == end);
                gate.open();
                cut.join().unwrap().unwrap();
                reader.join().unwrap()
            });
            for (answer, range) in answers.iter().zip(&ranges) {
                let start = range.start.min(end) as usize;
                let expected = &faulty.bytes[start..range.end.min(end) as usize];
                match answer.as_ref().map_err(Error::kind) {
                    // What was read before the cut may be longer than what is left.
                    Ok(bytes) => assert_same(&bytes[..expected.len()], expected),
                    Err(ErrorKind::PastEnd) => assert!(range.end > end),
                    Err(other) => panic!("{other:?}"),
                }
            }
            assert_same(&read_all(&file), &faulty.bytes[..end as usize]);
        }
    });
}

#[test]
fn failed_reads_keep_no_frame_and_no_lock() {
    for_each_way(LENGTH, |faulty| {
        let cache = faulty.builder(256 << 10).build().unwrap();
        let file = faulty.open(&cache);
        let ranges = single_pages();
        faulty.backing.inject(Fault::on(Call::Read).forever().fails(libc::EIO));
        for many in [read_many, pin_many] {
            // More often than there are frames.
            for _ in 0..10 {
                assert_eq!(failures(faulty, &ranges, &many(&file, &ranges)).len(), REQUESTS);
            }
        }
        let stats = cache.stats();
        assert_eq!(
            (
                stats.memory.inactive_bytes + stats.memory.active_bytes,
                stats.memory.allocation_failures
            ),
            (0, 0)
        );
        error_of(file.read_at(&mut [0; 10], 0), &["os error 5"]);
        faulty.backing.heal();
        assert_same(&read_all(&file), &faulty.bytes);
    });
}

//! The threads of the owner that serve one client: they answer its requests (RING-W1..W7), and mark
//! the pages that it has used.
//!
//! A client has a few, which start with it and end with it. So a request that waits for a device
//! delays at most requests of the same client. Nothing that is in the memory of the ring is used
//! without a check, and nothing is read twice.
//!
//! What a client can make a worker do is bounded by what the client does itself: one call for each
//! request. A doorbell that changes without a request, or more notes of used pages than the ring
//! has, slow the worker down ([`Pace`]).

use crate::error::Failure;
use crate::ring::{
    APPEND, Answer, DATA_BYTES, FILES_END, PIN, Part, READ, READ_MANY, Request, Ring, SET_LEN,
    SLOTS, SYNC_ALL, SYNC_DATA, Touch, UNPIN, WRITE, sleep_while,
};
use bifolio::{File, OwnedPageRef, ReadRequest};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};
use std::thread;
use std::time::Duration;

/// Files that a client has open at a time.
pub(crate) const FILES_MAX: usize = 16 << 10;
/// Pins that a client has at a time. They count within the bound of the cache.
pub(crate) const PINS_MAX: usize = 64 << 10;
/// Places of a batch.
const PARTS_MAX: usize = DATA_BYTES / Part::BYTES;
/// Bytes that a worker reads together for several requests.
const BATCH_BYTES_MAX: usize = 256 << 10;
/// Looks without anything to do before a worker waits for a moment.
const VAIN_LOOKS_MAX: u32 = 16;
const PAUSE: Duration = Duration::from_millis(1);

/// The files of a client, its ring, and the state of its workers.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) ring: Ring,
    files: RwLock<Files>,
    /// By the numbers that the client has given them.
    pins: Mutex<HashMap<u64, OwnedPageRef>>,
    /// Set while a worker has the slot.
    taken: [AtomicBool; SLOTS],
    has_ended: AtomicBool,
    /// Pages noted as used that were seen.
    seen_touches: Mutex<u64>,
}

#[derive(Debug, Default)]
struct Files {
    open: HashMap<u64, File>,
    last: u64,
}

impl Served {
    pub(crate) fn new(ring: Ring) -> Self {
        Self {
            ring,
            files: RwLock::default(),
            pins: Mutex::default(),
            taken: std::array::from_fn(|_| AtomicBool::new(false)),
            has_ended: AtomicBool::new(false),
            seen_touches: Mutex::new(0),
        }
    }

    /// Keeps a file open for the client. Returns its number, or `None` if the client has too many.
    pub(crate) fn add_file(&self, file: File) -> Option<u64> {
        let mut files = self.files_mut();
        if files.open.len() >= FILES_MAX {
            return None;
        }
        // Ends: there are fewer files than numbers.
        while files.open.contains_key(&files.last) || files.last == 0 {
            files.last = (files.last + 1) % FILES_END;
        }
        let number = files.last;
        files.open.insert(number, file);
        Some(number)
    }

    pub(crate) fn remove_file(&self, number: u64) -> Option<File> {
        self.files_mut().open.remove(&number)
    }

    fn files_mut(&self) -> RwLockWriteGuard<'_, Files> {
        self.files.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, number: u64) -> Option<File> {
        self.files.read().unwrap_or_else(PoisonError::into_inner).open.get(&number).cloned()
    }

    /// Ends the workers, and closes and drops what the client has.
    pub(crate) fn end(&self) {
        // Release: pairs with the Acquire in `run`; the doorbell wakes a worker that sleeps, and
        // that one the next.
        self.has_ended.store(true, Ordering::Release);
        self.ring.ring();
        self.drop_all();
    }

    /// Closes files and drops pins, without their locks.
    fn drop_all(&self) {
        let pins = std::mem::take(&mut *self.pins());
        drop(pins);
        let files = std::mem::take(&mut *self.files_mut());
        drop(files);
    }

    /// Runs a worker until the client ends.
    pub(crate) fn run(self: &Arc<Self>) {
        let mut buffer = Vec::new();
        let mut pace = Pace::default();
        loop {
            // Acquire: pairs with the Release in `Ring::ring`: a request of before it is seen.
            let bell = self.ring.doorbell().load(Ordering::Acquire);
            // Acquire: pairs with the Release in `end`.
            if self.has_ended.load(Ordering::Acquire) {
                self.ring.ring();
                // A pin that this worker has taken since the end.
                return self.drop_all();
            }
            let has_marked = self.mark_touches();
            let has_answered = self.serve_some(&mut buffer);
            let has_slept = !has_answered && sleep_while(self.ring.doorbell(), bell);
            pace.after_look(has_answered || has_slept || has_marked);
        }
    }

    /// Answers a request, or several reads of one file, if there are any. Returns `true` then.
    ///
    /// The reads are one batch, whose transfers are in flight together: few workers serve many
    /// threads of the client. Other requests are left for the next look, or for another worker: a
    /// read does not wait for a sync that another thread of the client has asked for.
    fn serve_some(&self, buffer: &mut Vec<u8>) -> bool {
        let mut reads = Vec::<(Taken<'_>, Request)>::new();
        let mut is_one_left = false;
        let mut room = BATCH_BYTES_MAX;
        for slot in 0..SLOTS {
            // Most slots are free: only looked at, their flags stay in the caches of all workers.
            if !self.ring.is_posted(slot) {
                continue;
            }
            let Some(taken) = self.take(slot) else { continue };
            let Some(request) = self.ring.posted(slot) else { continue };
            let is_read = request.call == READ && request.data_bytes() <= room;
            if is_read && reads.last().is_none_or(|(_, last)| last.file == request.file) {
                room -= request.data_bytes();
                reads.push((taken, request));
            } else if reads.is_empty() {
                self.ring.answer(slot, &self.answer(slot, request, buffer));
                return true;
            } else {
                is_one_left = true;
            }
        }
        if is_one_left {
            // Another worker may have looked while the slot was taken.
            self.ring.ring();
        }
        match &reads[..] {
            [] => return false,
            [(taken, request)] => {
                self.ring.answer(taken.slot, &self.answer(taken.slot, *request, buffer));
            }
            reads => self.answer_reads(reads, buffer),
        }
        true
    }

    /// Takes a slot, unless another worker has it (RING-W1).
    fn take(&self, slot: usize) -> Option<Taken<'_>> {
        // Acquire: pairs with the Release in the drop: the request that another worker has answered
        // is not seen again.
        let was_taken = self.taken[slot].swap(true, Ordering::Acquire);
        // Made only here: its drop would take the slot from the other worker.
        (!was_taken).then(|| Taken { served: self, slot })
    }

    fn answer_reads(&self, reads: &[(Taken<'_>, Request)], buffer: &mut Vec<u8>) {
        let file = match self.open_file(reads[0].1.file) {
            Ok(file) => file,
            Err(failure) => {
                let answer = Err(failure);
                return reads.iter().for_each(|(taken, _)| self.ring.answer(taken.slot, &answer));
            }
        };
        let wanted: Vec<_> =
            reads.iter().map(|(_, request)| (request.position, request.data_bytes())).collect();
        let results = read_batch(&file, &wanted, buffer);
        let mut start = 0;
        for (((taken, _), (_, length)), result) in reads.iter().zip(&wanted).zip(results) {
            let answer = result.map(|count| {
                self.ring.put_data(taken.slot, &buffer[start..start + count]);
                count as u64
            });
            self.ring.answer(taken.slot, &answer);
            start += length;
        }
    }

    fn open_file(&self, number: u64) -> Result<File, Failure> {
        let none = || Failure::invalid(format!("no file {number} is open here"));
        self.file(number).ok_or_else(none)
    }

    fn answer(&self, slot: usize, request: Request, buffer: &mut Vec<u8>) -> Answer {
        let Request { call, position, .. } = request;
        if call == UNPIN {
            drop(self.pins().remove(&position));
            return Ok(0);
        }
        let file = self.open_file(request.file)?;
        let length = request.data_bytes();
        let of = |error: bifolio::Error| Failure::of(&error);
        match call {
            READ => {
                buffer.resize(length, 0);
                let count = file.read_for_client(&mut buffer[..length], position).map_err(of)?;
                self.ring.put_data(slot, &buffer[..count]);
                Ok(count as u64)
            }
            READ_MANY => self.read_many(slot, &file, request.length, buffer),
            PIN => self.pin(slot, &file, position..position.saturating_add(request.length)),
            WRITE | APPEND => {
                buffer.resize(length, 0);
                self.ring.take_data(slot, &mut buffer[..length]);
                if call == WRITE {
                    file.write_at(&buffer[..length], position).map(|count| count as u64)
                } else {
                    file.append(&buffer[..length])
                }
                .map_err(of)
            }
            SET_LEN => file.set_len(position).map(|()| 0).map_err(of),
            SYNC_DATA => file.sync_data().map(|()| 0).map_err(of),
            SYNC_ALL => file.sync_all().map(|()| 0).map_err(of),
            call => Err(Failure::invalid(format!("{call} is no call of this version"))),
        }
    }

    fn read_many(&self, slot: usize, file: &File, parts: u64, buffer: &mut Vec<u8>) -> Answer {
        let invalid = || Failure::invalid("a batch that is longer than the data of a request");
        let count = usize::try_from(parts).ok().filter(|count| *count <= PARTS_MAX);
        let list_bytes = count.ok_or_else(invalid)? * Part::BYTES;
        let mut list = vec![0; list_bytes];
        self.ring.take_data(slot, &mut list);
        let parts = Part::decode_all(&list);
        let length = |part: &Part| usize::try_from(part.second).unwrap_or(usize::MAX);
        let total = parts.iter().try_fold(list_bytes, |sum, part| sum.checked_add(length(part)));
        if total.is_none_or(|total| total > DATA_BYTES) {
            return Err(invalid());
        }
        let wanted: Vec<_> = parts.iter().map(|part| (part.first, length(part))).collect();
        let results = read_batch(file, &wanted, buffer);
        let answer_of = |result: Answered| match result {
            Ok(count) => Part { first: count as u64, second: 0 },
            Err(_) => Part { first: 0, second: 1 },
        };
        list = Part::encode_all(&results.into_iter().map(answer_of).collect::<Vec<_>>());
        list.extend_from_slice(buffer);
        self.ring.put_data(slot, &list);
        Ok(0)
    }

    fn pin(&self, slot: usize, file: &File, range: Range<u64>) -> Answer {
        let mut number = [0; 8];
        self.ring.take_data(slot, &mut number);
        let number = u64::from_le_bytes(number);
        let pin = file.pin(range).map_err(|error| Failure::of(&error))?;
        let private = || Failure::invalid("the pages of this file are not shared");
        let offset_bytes = file.shared_offset_of(&pin).ok_or_else(private)?;
        let mut pins = self.pins();
        // Of the same number: another pin of this client, which it has given up.
        if pins.len() >= PINS_MAX && !pins.contains_key(&number) {
            return Err(Failure::invalid(format!("a client has at most {PINS_MAX} pins")));
        }
        pins.insert(number, pin.into_owned());
        Ok(offset_bytes)
    }

    fn pins(&self) -> MutexGuard<'_, HashMap<u64, OwnedPageRef>> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the pages that the client has noted as used. Returns `true` if there were some, but
    /// not more than the ring has.
    fn mark_touches(&self) -> bool {
        // Another worker that is at it does it.
        let Ok(mut seen) = self.seen_touches.try_lock() else { return false };
        let before = *seen;
        let mut last: Option<(u64, File)> = None;
        let mark = |Touch { file: number, page }| {
            if last.as_ref().is_none_or(|(last, _)| *last != number) {
                last = self.file(number).map(|file| (number, file));
            }
            if let Some((_, file)) = &last {
                file.note_used(page);
            }
        };
        let has_all = self.ring.touches_since(&mut seen, mark);
        has_all && *seen != before
    }
}

impl Request {
    /// Returns how many bytes of data the request has at most, or may have.
    fn data_bytes(&self) -> usize {
        usize::try_from(self.length).unwrap_or(usize::MAX).min(DATA_BYTES)
    }
}

/// Number of bytes that a part of a batch has read.
type Answered = Result<usize, Failure>;

/// Reads bytes at several places, with their misses in flight together. The buffer then has the
/// bytes one after the other, each as long as wanted, whatever was read.
fn read_batch(file: &File, wanted: &[(u64, usize)], buffer: &mut Vec<u8>) -> Vec<Answered> {
    buffer.clear();
    buffer.resize(wanted.iter().map(|(_, length)| length).sum(), 0);
    let mut rest = &mut buffer[..];
    let mut requests = Vec::with_capacity(wanted.len());
    for (position, length) in wanted {
        let (target, others) = rest.split_at_mut(*length);
        requests.push(ReadRequest::new(target, *position));
        rest = others;
    }
    let read = file.read_many(&mut requests).map_err(|error| Failure::of(&error));
    if let Err(Failure { code, errno, text }) = read {
        let failure = || Failure { code, errno, text: text.clone() };
        return wanted.iter().map(|_| Err(failure())).collect();
    }
    requests.into_iter().map(|it| it.result.map_err(|error| Failure::of(&error))).collect()
}

/// A slot that this worker has, until the drop (RING-W6).
struct Taken<'s> {
    served: &'s Served,
    slot: usize,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `take`.
        self.served.taken[self.slot].store(false, Ordering::Release);
    }
}

/// Slows a worker down that finds nothing again and again, and cannot sleep either, because the
/// client changes the doorbell without waking it, which costs the client one store.
#[derive(Debug, Default)]
struct Pace {
    vain_looks: u32,
}

impl Pace {
    fn after_look(&mut self, is_fair: bool) {
        if is_fair {
            self.vain_looks = 0;
            return;
        }
        self.vain_looks += 1;
        if self.vain_looks > VAIN_LOOKS_MAX {
            thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Options, SharedCache};
    use crate::ring::{RING_BYTES, Requests};
    use crate::server::Server;
    use crate::wire::{self, Message};
    use bifolio::Cache;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    use std::os::fd::{AsFd, OwnedFd};
    use std::path::Path;
    use std::time::Instant;

    /// A client that says what it likes: its socket and its ring.
    struct Liar {
        socket: OwnedFd,
        ring: OwnedFd,
    }

    impl Liar {
        fn connect(path: &Path) -> Self {
            let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
            let socket = rustix::net::socket_with(kind.0, kind.1, kind.2, None).unwrap();
            rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
            let (hello, mut descriptors) = wire::receive(socket.as_fd()).unwrap().unwrap();
            assert_eq!(hello.kind, wire::HELLO);
            Self { ring: descriptors.pop().unwrap(), socket }
        }

        fn area(&self) -> bifolio::sharing::SharedArea {
            let ring = self.ring.try_clone().unwrap();
            bifolio::sharing::SharedArea::open(ring, RING_BYTES).unwrap()
        }

        fn open(&self, file: &std::fs::File) -> u64 {
            let open = Message::new(wire::OPEN, &[wire::OPEN_READ]);
            wire::send(self.socket.as_fd(), &open, &[file.as_fd()]).unwrap();
            wire::receive(self.socket.as_fd()).unwrap().unwrap().0.words[0]
        }
    }

    /// Random words in the ring, random messages, holes in the memory. Beside it an honest client
    /// reads, and none of its reads takes a second.
    #[test]
    fn a_lying_client_harms_only_itself() {
        let directory = tempfile::tempdir().unwrap();
        let (path, socket) = (directory.path().join("file"), directory.path().join("socket"));
        std::fs::write(&path, vec![7; 4 << 20]).unwrap();
        let cache = Cache::builder().memory(1 << 20).shared(true).build().unwrap();
        let server = Server::start(&cache, &socket).unwrap();
        let has_ended = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let client = SharedCache::connect(&socket).unwrap();
                let file = client.open(&path, &Options::new()).unwrap();
                let mut random = fastrand::Rng::with_seed(7);
                while !has_ended.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    let mut bytes = [0; 4096];
                    let position = random.u64(..1023) * 4096;
                    assert_eq!(file.read_at(&mut bytes, position).unwrap(), 4096);
                    assert!(bytes.iter().all(|byte| *byte == 7));
                    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
                }
            });
            for seed in 0..30 {
                lie(&socket, &path, seed);
            }
            has_ended.store(true, Ordering::Relaxed);
        });
        let begun = Instant::now();
        while server.clients() > 0 {
            assert!(begun.elapsed() < Duration::from_secs(20), "{} clients", server.clients());
            thread::sleep(Duration::from_millis(1));
        }
        drop(server);
        cache.close().unwrap();
    }

    fn lie(socket: &Path, path: &Path, seed: u64) {
        let mut random = fastrand::Rng::with_seed(seed);
        let liar = Liar::connect(socket);
        let number = liar.open(&std::fs::File::open(path).unwrap());
        let area = liar.area();
        let plausible = |random: &mut fastrand::Rng| match random.u32(..6) {
            0 => random.u64(..12),
            1 => number,
            2 => random.u64(..2 << 20),
            3 => random.u64(..DATA_BYTES as u64 + 2),
            4 => u64::MAX - random.u64(..3),
            _ => random.u64(..),
        };
        for _ in 0..2000 {
            match random.u32(..20) {
                0 => area.futex(0).store(random.u32(..), Ordering::Relaxed),
                1 => area.word(64).store(plausible(&mut random), Ordering::Relaxed),
                2 => {
                    let word = random.usize(..RING_BYTES / 8) * 8;
                    area.word(word).store(plausible(&mut random), Ordering::Relaxed);
                }
                3 => {
                    // A hole in the ring.
                    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE
                        | rustix::fs::FallocateFlags::KEEP_SIZE;
                    let page = random.u64(..RING_BYTES as u64 / 4096) * 4096;
                    rustix::fs::fallocate(&liar.ring, flags, page, 4096).unwrap();
                }
                4 if random.u32(..50) == 0 => {
                    let message = Message::new(random.u64(..8), &[plausible(&mut random)]);
                    let sent = wire::send(liar.socket.as_fd(), &message, &[liar.ring.as_fd()]);
                    if sent.is_err() || wire::receive(liar.socket.as_fd()).is_err() {
                        return;
                    }
                }
                _ => {
                    // A request of a slot, whatever it does already.
                    let slot = 4096 + random.usize(..SLOTS) * 64;
                    for word in 1..5 {
                        area.word(slot + word * 8).store(plausible(&mut random), Ordering::Relaxed);
                    }
                    area.futex(slot).store(random.u32(..5), Ordering::Relaxed);
                    let ring = Ring { area: liar.area() };
                    ring.ring();
                }
            }
        }
        if random.bool() {
            // Garbage, too: then the owner ends the connection.
            let _ = rustix::net::send(&liar.socket, &[1, 2, 3], rustix::net::SendFlags::NOSIGNAL);
        }
    }

    #[test]
    fn a_worker_that_is_deceived_sleeps() {
        let mut pace = Pace::default();
        let begun = Instant::now();
        (0..VAIN_LOOKS_MAX).for_each(|_| pace.after_look(false));
        let looks = begun.elapsed();
        (0..10).for_each(|_| pace.after_look(false));
        assert!(begun.elapsed() - looks >= 10 * PAUSE);
        pace.after_look(true);
        assert_eq!(pace.vain_looks, 0);
    }

    #[test]
    fn numbers_of_files_are_used_again_only_after_a_close() {
        let ring = Ring { area: bifolio::sharing::SharedArea::create(RING_BYTES).unwrap() };
        let descriptor = ring.area.descriptor().try_clone_to_owned().unwrap();
        let served = Served::new(ring);
        let _client = Requests::open(descriptor).unwrap();
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.memory_file("file").unwrap();
        served.files.write().unwrap().last = FILES_END - 2;
        let numbers: Vec<_> = (0..4).map(|_| served.add_file(file.clone()).unwrap()).collect();
        assert_eq!(numbers, [FILES_END - 2, FILES_END - 1, 1, 2]);
        assert!(served.remove_file(1).is_some() && served.remove_file(1).is_none());
        served.files.write().unwrap().last = FILES_END - 1;
        assert_eq!(served.add_file(file), Some(1));
    }
}

//! The client: files of an owner's cache, read without the owner where their pages are resident.
//!
//! A thread of the client waits for the owner's end. Then it turns hits off, which every hit tests,
//! and wakes the threads that wait for an answer. In a forked child hits are off, because it has no
//! such thread, and every call fails.

use crate::error::{Error, ErrorKind, Failure, Result};
use crate::ring::{
    APPEND, DATA_BYTES, PIN, Part, READ_MANY, Request, Requests, SET_LEN, SYNC_ALL, SYNC_DATA,
    Touch, UNPIN, WRITE,
};
use crate::server::{process_of, refused};
use crate::wire::{self, Message};
use bifolio::sharing::{FilePlace, FileWindow, FramePlace, Window};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown,
    socket_with,
};
use rustix::process::geteuid;
use std::fmt;
use std::fs;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Maximum length of an append, bytes.
pub const APPEND_BYTES_MAX: usize = DATA_BYTES;
const PAGE_BYTES: usize = 4096;

/// A connection to the cache of another process. Cheap to clone; files keep it open.
#[derive(Clone, Debug)]
pub struct SharedCache {
    connection: Arc<Connection>,
}

/// How a file is opened.
#[derive(Clone, Debug, Default)]
pub struct Options {
    write: bool,
}

impl Options {
    /// Returns options to read.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens the file also for writing.
    pub fn write(mut self, write: bool) -> Self {
        self.write = write;
        self
    }
}

/// The parts of a connection that its watcher uses, too.
#[derive(Debug)]
struct Parts {
    window: Arc<Window>,
    requests: Requests,
    socket: OwnedFd,
    /// Tells of the end of the owner's process, where the kernel can: a child of the owner may have
    /// the socket, too.
    owner: Option<OwnedFd>,
    /// The process that connected.
    process: u32,
    /// Number of the last pin.
    last_pin: AtomicU64,
}

#[derive(Debug)]
struct Connection {
    parts: Arc<Parts>,
    /// Held from a message of the socket to its answer.
    asking: Mutex<()>,
}

impl SharedCache {
    /// Connects to the owner that listens at `path`.
    ///
    /// # Errors
    /// No owner listens there; it refuses this process ([`ErrorKind::Refused`]); the system refuses
    /// memory or a thread.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |error: Errno| Error::system(path.display(), error);
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None).map_err(failed)?;
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        connect(&socket, &address).map_err(failed)?;
        let owner = socket_peercred(&socket).map_err(failed)?;
        if owner.uid != geteuid() {
            let text = "the owner of the cache is a process of another user";
            return Err(Error::new(ErrorKind::Refused, text));
        }
        let owner = process_of(owner.pid);
        let parts = Arc::new(Parts::greeted(socket, owner)?);
        let watcher = Arc::clone(&parts);
        let started =
            thread::Builder::new().name("share-watch".to_owned()).spawn(move || watcher.watch());
        started.map_err(|error| Error::system("a thread", error))?;
        Ok(Self { connection: Arc::new(Connection { parts, asking: Mutex::new(()) }) })
    }

    /// Opens the file at `path`, with the rights of this process.
    ///
    /// # Errors
    /// The system refuses the file to this process; the owner's `Cache::open_fd` fails.
    pub fn open(&self, path: impl AsRef<Path>, options: &Options) -> Result<SharedFile> {
        let path = path.as_ref();
        self.connection.parts.check()?;
        // A pipe without a writer must not block; the owner refuses it.
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file = fs::OpenOptions::new()
            .read(true)
            .write(options.write)
            .custom_flags(nonblocking)
            .open(path)
            .map_err(|error| Error::system(path.display(), error))?;
        let flags = wire::OPEN_READ | if options.write { wire::OPEN_WRITE } else { 0 };
        let open = Message::new(wire::OPEN, &[flags]);
        let answer = self.connection.ask(&open, Some(&file), wire::OPENED)?;
        let [number, hot_offset, entries_offset, entries, _] = answer.words;
        let place = FilePlace { hot_offset, entries_offset, entries };
        let connection = Arc::clone(&self.connection);
        let mut opened = SharedFile { connection, number, window: None };
        if entries > 0 {
            let window = FileWindow::new(&self.connection.parts.window, &place);
            let window = window.map_err(|error| Error::system("memory of the cache", error))?;
            opened.window = Some(window);
        }
        Ok(opened)
    }

    /// Returns `true` until the owner or the connection ends.
    pub fn is_connected(&self) -> bool {
        self.connection.parts.window.is_on()
    }
}

impl Parts {
    /// Receives what the owner tells a new client.
    fn greeted(socket: OwnedFd, owner: Option<OwnedFd>) -> Result<Self> {
        let received = wire::receive(socket.as_fd());
        let received = received.map_err(|error| Error::system("the socket", error))?;
        let (hello, descriptors) = received.ok_or_else(Error::owner_gone)?;
        if hello.kind == wire::FAILED {
            return Err(refused(hello.into_failure()));
        }
        let [version, offset_bytes, length_bytes, ..] = hello.words;
        if hello.kind != wire::HELLO || version != wire::VERSION {
            let text = format!(
                "the owner has version {version} of the protocol, and this process {}: both need \
                 the same version of bifolio-share",
                wire::VERSION
            );
            return Err(Error::new(ErrorKind::Refused, text));
        }
        let Ok([memory, ring]) = <[OwnedFd; 2]>::try_from(descriptors) else {
            // The process may have had no descriptor left for them.
            return Err(Error::new(ErrorKind::System, "the descriptors of the owner's memory"));
        };
        let failed = |error| Error::system("memory of the cache", error);
        let place = FramePlace { memory, offset_bytes, length_bytes };
        let window = Window::new(place).map_err(failed)?;
        let requests = Requests::open(ring).map_err(failed)?;
        let process = std::process::id();
        Ok(Self { window, requests, socket, owner, process, last_pin: AtomicU64::new(0) })
    }

    /// Waits for the end of the owner or of the connection, then ends hits and requests.
    fn watch(&self) {
        let mut polled = vec![PollFd::new(&self.socket, PollFlags::RDHUP)];
        polled.extend(self.owner.as_ref().map(|owner| PollFd::new(owner, PollFlags::IN)));
        while poll(&mut polled, None) == Err(Errno::INTR) {}
        self.window.turn_off();
        self.requests.give_up();
        // A call that waits for an answer.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    fn check(&self) -> Result<()> {
        if self.window.is_on() { Ok(()) } else { Err(self.gone()) }
    }

    #[cold]
    fn gone(&self) -> Error {
        if std::process::id() == self.process { Error::owner_gone() } else { Error::forked() }
    }
}

impl Connection {
    /// Sends a message to the owner and returns its answer, of this kind.
    fn ask(&self, message: &Message, file: Option<&fs::File>, kind: u64) -> Result<Message> {
        self.parts.check()?;
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let socket = self.parts.socket.as_fd();
        let descriptors: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        let sent = wire::send(socket, message, &descriptors);
        let received = sent.and_then(|()| wire::receive(socket));
        // An end in the middle is an end.
        let (answer, _) = received.ok().flatten().ok_or_else(Error::owner_gone)?;
        match answer.kind {
            wire::FAILED => Err(answer.into_failure().into_error()),
            found if found == kind => Ok(answer),
            found => Err(Failure::invalid(format!("{found} is no answer")).into_error()),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A child has the socket of its parent.
        if std::process::id() == self.parts.process {
            let _ = shutdown(&self.parts.socket, Shutdown::Both);
        }
    }
}

/// A read of [`SharedFile::read_many`].
#[derive(Debug)]
pub struct ReadRequest<'b> {
    /// Position of the first byte, in bytes.
    pub position: u64,
    /// The buffer to fill.
    pub buffer: &'b mut [u8],
    /// Number of bytes read, with the contract of [`SharedFile::read_at`].
    pub result: Result<usize>,
}

impl<'b> ReadRequest<'b> {
    /// Creates a request to fill `buffer` with the bytes at `position`.
    pub fn new(buffer: &'b mut [u8], position: u64) -> Self {
        Self { position, buffer, result: Ok(0) }
    }
}

/// A file of a shared cache. Safe to share between threads.
pub struct SharedFile {
    connection: Arc<Connection>,
    number: u64,
    /// `None` if the file has no pages that others can read: all reads are requests.
    window: Option<FileWindow>,
}

impl fmt::Debug for SharedFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("SharedFile").field("number", &self.number).finish_non_exhaustive()
    }
}

impl SharedFile {
    /// Reads bytes at `position` into `buffer` and returns their number, as
    /// `bifolio::File::read_at` does: it is smaller than the length of `buffer` only at the end of
    /// file, or before a byte that cannot be read.
    ///
    /// A hit calls nothing of the owner. Atomic with respect to writes within one 4 KiB page.
    ///
    /// # Errors
    /// [`ErrorKind::OwnerGone`]; those of the owner's call ([`ErrorKind::Call`]).
    #[inline]
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        let done = self.read_resident(buffer, position);
        if done == buffer.len() && done > 0 {
            return Ok(done);
        }
        self.read_rest(buffer, position, done)
    }

    /// Copies the first bytes that are resident. Returns their number.
    #[inline]
    fn read_resident(&self, buffer: &mut [u8], position: u64) -> usize {
        let Some(window) = &self.window else { return 0 };
        window.read(buffer, position, |page| {
            self.connection.parts.requests.note(Touch { file: self.number, page });
        })
    }

    /// Reads the bytes after the first `done`, by requests where they are no hits.
    #[inline(never)]
    fn read_rest(&self, buffer: &mut [u8], position: u64, mut done: usize) -> Result<usize> {
        let parts = &self.connection.parts;
        loop {
            parts.check()?;
            let at = position.saturating_add(done as u64);
            match parts.requests.read(self.number, at, &mut buffer[done..]) {
                Ok(0) => return Ok(done),
                Ok(count) => done += count,
                Err(error) if done == 0 || error.kind() == ErrorKind::OwnerGone => {
                    return Err(error);
                }
                // The bytes read so far are valid; the next call returns the error.
                Err(_) => return Ok(done),
            }
            if done < buffer.len() {
                let at = position.saturating_add(done as u64);
                done += self.read_resident(&mut buffer[done..], at);
            }
            if done == buffer.len() {
                return Ok(done);
            }
        }
    }

    /// Completes all `requests`: hits are copied here, and what is missing is read by the owner,
    /// with the transfers of a batch in flight together. Each request has its own result.
    ///
    /// # Errors
    /// [`ErrorKind::OwnerGone`]; then no request has a result to rely on.
    pub fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> Result<()> {
        let mut batch = Vec::new();
        let mut batch_bytes = 0;
        for number in 0..requests.len() {
            let request = &mut requests[number];
            let length = request.buffer.len();
            let done = self.read_resident(request.buffer, request.position);
            request.result = Ok(done);
            if done == length {
                continue;
            }
            let left_bytes = Part::BYTES + length - done;
            if left_bytes > DATA_BYTES {
                request.result = self.read_rest(request.buffer, request.position, done);
                continue;
            }
            if batch_bytes + left_bytes > DATA_BYTES {
                self.read_batch(requests, &batch)?;
                batch.clear();
                batch_bytes = 0;
            }
            batch.push(number);
            batch_bytes += left_bytes;
        }
        self.read_batch(requests, &batch)
    }

    /// Reads what is left of the requests with these numbers, which fits in one request of a ring.
    fn read_batch(&self, requests: &mut [ReadRequest<'_>], batch: &[usize]) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        self.connection.parts.check()?;
        let left = |request: &ReadRequest<'_>| {
            let done = *request.result.as_ref().unwrap_or(&0);
            Part {
                first: request.position + done as u64,
                second: (request.buffer.len() - done) as u64,
            }
        };
        let parts: Vec<_> = batch.iter().map(|number| left(&requests[*number])).collect();
        let list = Part::encode_all(&parts);
        let bytes = parts.iter().map(|part| part.second as usize).sum::<usize>();
        let mut answer = vec![0; list.len() + bytes];
        let length = batch.len() as u64;
        let request = Request { call: READ_MANY, file: self.number, position: 0, length };
        self.connection.parts.requests.make(request, &list, &mut answer)?;
        let (list, mut bytes) = answer.split_at(list.len());
        for ((number, part), answer) in batch.iter().zip(parts).zip(Part::decode_all(list)) {
            let request = &mut requests[*number];
            let (found, rest) = bytes.split_at(part.second as usize);
            bytes = rest;
            let done = request.buffer.len() - found.len();
            if answer.second != 0 {
                // Alone, for its error.
                request.result = self.read_rest(request.buffer, request.position, done);
                continue;
            }
            let count = found.len().min(usize::try_from(answer.first).unwrap_or(usize::MAX));
            request.buffer[done..done + count].copy_from_slice(&found[..count]);
            request.result = Ok(done + count);
        }
        Ok(())
    }

    /// Keeps the bytes of `range`, which lie in one folio, in memory. They are read from there
    /// without a check. The pin counts within the bound of the owner's cache, until it is dropped
    /// or this process ends.
    ///
    /// # Errors
    /// Those of the owner's `File::pin`; [`ErrorKind::OwnerGone`].
    pub fn pin(&self, range: Range<u64>) -> Result<SharedPin> {
        let parts = &self.connection.parts;
        parts.check()?;
        // Relaxed: only the value counts.
        let number = parts.last_pin.fetch_add(1, Ordering::Relaxed) + 1;
        let length = range.end.saturating_sub(range.start);
        let position = range.start;
        let request = Request { call: PIN, file: self.number, position, length };
        let offset_bytes = parts.requests.make(request, &number.to_le_bytes(), &mut [])?;
        let connection = Arc::clone(&self.connection);
        Ok(SharedPin { connection, number, offset_bytes, length })
    }

    /// Writes `buffer` at `position`: the bytes are in the owner's cache when the call returns, and
    /// stay if this process ends. All bytes of a 4 KiB page are written at once.
    ///
    /// # Errors
    /// Those of the owner's `File::write_at`, after which a part may be written;
    /// [`ErrorKind::OwnerGone`].
    pub fn write_all_at(&self, buffer: &[u8], position: u64) -> Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let at = position.saturating_add(done as u64);
            // A part ends at the end of a page: none is written twice.
            let room = DATA_BYTES - (at as usize & (PAGE_BYTES - 1));
            let part = &buffer[done..buffer.len().min(done + room)];
            match self.request(WRITE, at, part)? {
                0 => {
                    let text = format!("no byte could be written at {at}");
                    return Err(Failure::invalid(text).into_error());
                }
                count => done += usize::try_from(count).unwrap_or(usize::MAX).min(part.len()),
            }
        }
        Ok(())
    }

    /// Appends `buffer`, at most [`APPEND_BYTES_MAX`], after the last byte of the file. Returns its
    /// position. What several threads or processes append follows each other.
    ///
    /// # Errors
    /// Those of the owner's `File::append`; a buffer that is longer; [`ErrorKind::OwnerGone`].
    pub fn append(&self, buffer: &[u8]) -> Result<u64> {
        if buffer.len() > APPEND_BYTES_MAX {
            let text = format!(
                "an append of {} bytes: a client appends at most {APPEND_BYTES_MAX} at once",
                buffer.len()
            );
            return Err(Failure::invalid(text).into_error());
        }
        self.request(APPEND, 0, buffer)
    }

    /// Sets the length of the file.
    ///
    /// # Errors
    /// Those of the owner's `File::set_len`; [`ErrorKind::OwnerGone`].
    pub fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.request(SET_LEN, len_bytes, &[]).map(drop)
    }

    /// Makes every write to the file that returned before this call durable, whichever process
    /// made it.
    ///
    /// # Errors
    /// Those of the owner's `File::sync_data`; [`ErrorKind::OwnerGone`].
    pub fn sync_data(&self) -> Result<()> {
        self.request(SYNC_DATA, 0, &[]).map(drop)
    }

    /// Makes writes and the file's metadata durable.
    ///
    /// # Errors
    /// As [`Self::sync_data`].
    pub fn sync_all(&self) -> Result<()> {
        self.request(SYNC_ALL, 0, &[]).map(drop)
    }

    fn request(&self, call: u64, position: u64, data: &[u8]) -> Result<u64> {
        self.connection.parts.check()?;
        let request = Request { call, file: self.number, position, length: data.len() as u64 };
        self.connection.parts.requests.make(request, data, &mut [])
    }

    /// Returns the length of the file in bytes.
    ///
    /// # Errors
    /// [`ErrorKind::OwnerGone`]; the file has no length that others can read.
    pub fn len_bytes(&self) -> Result<u64> {
        self.connection.parts.check()?;
        let none = || Failure::invalid("the file's length is not shared").into_error();
        self.window.as_ref().map(FileWindow::len_bytes).ok_or_else(none)
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        // Its words stay those of the file until the owner has closed it; no hit is left.
        let close = Message::new(wire::CLOSE, &[self.number]);
        let _ = self.connection.ask(&close, None, wire::CLOSED);
    }
}

/// Bytes that stay in memory; from [`SharedFile::pin`].
pub struct SharedPin {
    connection: Arc<Connection>,
    number: u64,
    /// Offset of the first byte in the frames.
    offset_bytes: u64,
    length: u64,
}

impl fmt::Debug for SharedPin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("SharedPin").field("len", &self.length).finish_non_exhaustive()
    }
}

impl SharedPin {
    /// Returns the number of pinned bytes.
    #[expect(clippy::len_without_is_empty, reason = "a pin has at least a byte")]
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Copies pinned bytes from `offset` on. A write to them at the same time may be seen in part.
    ///
    /// # Errors
    /// A range that is not pinned; [`ErrorKind::OwnerGone`]: nobody keeps the bytes any more.
    pub fn copy_to(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        let window = &self.connection.parts.window;
        let is_copied = end.is_some_and(|end| end <= self.length)
            && window.copy_frames(self.offset_bytes + offset, buffer);
        if !is_copied {
            return Err(Failure::invalid("bytes outside of the pin").into_error());
        }
        // Acquire: pairs with the connection's end. The owner drops the pins of a connection after
        // the watcher has turned hits off and closed the socket: while they are on, the pin holds.
        fence(Ordering::Acquire);
        let still = self.connection.parts.check();
        if still.is_err() {
            buffer.fill(0);
        }
        still
    }
}

impl Drop for SharedPin {
    fn drop(&mut self) {
        let parts = &self.connection.parts;
        if parts.check().is_ok() {
            let request = Request { call: UNPIN, file: 0, position: self.number, length: 0 };
            // After the owner's end there is no pin.
            let _ = parts.requests.make(request, &[], &mut []);
        }
    }
}

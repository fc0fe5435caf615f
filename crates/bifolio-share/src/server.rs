//! The owner: a socket on which clients connect, and a thread for each that opens files for it.
//!
//! A thread of a client ends, and with it all that the client has, when its socket or its process
//! ends. Both are waited for: a child of the client may have the socket, too.

use crate::error::{Error, ErrorKind, Failure, Result};
use crate::ring::{RING_BYTES, Ring};
use crate::wire::{self, Message};
use crate::worker::{FILES_MAX, Served};
use bifolio::sharing::{FramePlace, SharedArea};
use bifolio::{Cache, OpenOptions};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, shutdown, socket_with,
};
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Clients at a time: each has threads and up to 2 MiB of memory for its requests, outside of the
/// bound of the cache.
const CLIENTS_MAX: usize = 64;
/// Threads that answer the requests of one client.
const WORKERS: usize = 2;
const BACKLOG: i32 = 64;
/// Time that a client has to close its side after the server's end.
const END_WAIT_MAX: Duration = Duration::from_secs(1);

/// Serves a cache to other processes of the same user, until it is dropped.
///
/// The drop ends all connections: calls of clients fail with [`ErrorKind::OwnerGone`], and their
/// files and pins are given up. It waits up to a second for clients that are slow to notice.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
    path: PathBuf,
}

#[derive(Debug)]
struct Shared {
    cache: Cache,
    listener: OwnedFd,
    clients: Mutex<Clients>,
    /// Notified when a client has ended.
    left: Condvar,
}

#[derive(Debug, Default)]
struct Clients {
    sockets: HashMap<u64, Arc<OwnedFd>>,
    last: u64,
    has_ended: bool,
}

impl Server {
    /// Starts to serve `cache` on a socket at `path`, which only the user of this process can
    /// connect to. A socket there that no process listens to is replaced.
    ///
    /// # Errors
    /// The cache was not built with `CacheBuilder::shared`; another process listens at `path`; the
    /// system refuses a socket or a thread.
    pub fn start(cache: &Cache, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let failed = |error: &bifolio::Error| Failure::of(error).into_error();
        // Not for its value: whether there is one.
        cache.shared_frames().map_err(|error| failed(&error))?;
        let listener = listener_at(&path);
        let listener = listener.map_err(|error| Error::system(path.display(), error))?;
        let (clients, left) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { cache: cache.clone(), listener, clients, left });
        let acceptor = {
            let shared = Arc::clone(&shared);
            thread::Builder::new().name("share-accept".to_owned()).spawn(move || shared.accept())
        };
        let acceptor = acceptor.map_err(|error| Error::system("a thread", error))?;
        Ok(Self { shared, acceptor: Some(acceptor), path })
    }

    /// Returns the number of connected clients.
    pub fn clients(&self) -> usize {
        self.shared.clients().sockets.len()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The name first: who connects from now on finds another owner, or none.
        let _ = std::fs::remove_file(&self.path);
        let mut clients = self.shared.clients();
        clients.has_ended = true;
        for socket in clients.sockets.values() {
            // The client turns its hits off, and closes its side; then its pins are dropped.
            let _ = shutdown(&**socket, Shutdown::Write);
        }
        // Ends the wait of `accept`.
        let _ = shutdown(&self.shared.listener, Shutdown::Both);
        let some = |clients: &mut Clients| !clients.sockets.is_empty();
        let waited = self.shared.left.wait_timeout_while(clients, END_WAIT_MAX, some);
        let (clients, _) = waited.unwrap_or_else(PoisonError::into_inner);
        for socket in clients.sockets.values() {
            let _ = shutdown(&**socket, Shutdown::Both);
        }
        drop(clients);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn listener_at(path: &Path) -> io::Result<OwnedFd> {
    let socket =
        || socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let address = SocketAddrUnix::new(path)?;
    let listener = socket()?;
    // The mode of the name that `bind` makes.
    rustix::fs::fchmod(&listener, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    match bind(&listener, &address) {
        Err(Errno::ADDRINUSE) => {
            // A name without a listener is left by an owner that was killed.
            if connect(socket()?, &address) != Err(Errno::CONNREFUSED) {
                return Err(Errno::ADDRINUSE.into());
            }
            std::fs::remove_file(path)?;
            bind(&listener, &address)?;
        }
        bound => bound?,
    }
    listen(&listener, BACKLOG)?;
    Ok(listener)
}

impl Shared {
    fn clients(&self) -> std::sync::MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>) {
        loop {
            match accept_with(&self.listener, SocketFlags::CLOEXEC) {
                Ok(socket) => self.start_client(socket),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // After the shutdown.
                Err(Errno::INVAL) => return,
                Err(error) => {
                    if self.clients().has_ended {
                        return;
                    }
                    // No descriptor is left: the client waits, or gives up.
                    log::warn!("cannot accept a client: {error}");
                    thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        }
    }

    fn start_client(self: &Arc<Self>, socket: OwnedFd) {
        let socket = Arc::new(socket);
        let added = self.add(&socket);
        let Ok(number) = added.map_err(|text| refuse(&socket, text)) else { return };
        let client = Client { server: Arc::clone(self), socket: Arc::clone(&socket), number };
        let name = "share-client".to_owned();
        if let Err(error) = thread::Builder::new().name(name).spawn(move || client.run()) {
            // The closure was dropped, and with it the client.
            refuse(&socket, &format!("a thread: {error}"));
        }
    }

    fn add(&self, socket: &Arc<OwnedFd>) -> std::result::Result<u64, &'static str> {
        let peer = socket_peercred(&**socket).map_err(|_| "the user of the client is not known")?;
        if peer.uid != geteuid() {
            return Err("the cache belongs to another user");
        }
        let mut clients = self.clients();
        if clients.has_ended {
            return Err("the owner is about to end");
        }
        if clients.sockets.len() >= CLIENTS_MAX {
            return Err("too many clients (64)");
        }
        clients.last += 1;
        let number = clients.last;
        clients.sockets.insert(number, Arc::clone(socket));
        Ok(number)
    }
}

fn refuse(socket: &OwnedFd, text: &str) {
    let text = format!("the owner of the cache refuses this client: {text}");
    // The client may be gone.
    let _ = wire::send(socket.as_fd(), &Message::failed(&Failure::invalid(text)), &[]);
}

/// The connection of a client; its drop forgets the client.
struct Client {
    server: Arc<Shared>,
    socket: Arc<OwnedFd>,
    number: u64,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.server.clients().sockets.remove(&self.number);
        self.server.left.notify_all();
    }
}

impl Client {
    fn run(self) {
        match self.greet() {
            Ok(served) => {
                if let Err(error) = self.serve(&served) {
                    log::warn!("a client of the shared cache was disconnected: {error}");
                }
                served.end();
                let _ = shutdown(&*self.socket, Shutdown::Both);
            }
            Err(error) => refuse(&self.socket, &error.to_string()),
        }
    }

    /// Makes the memory of requests, starts workers, and tells the client where all is.
    fn greet(&self) -> Result<Arc<Served>> {
        let area = SharedArea::create(RING_BYTES);
        let area = area.map_err(|error| Error::system("memory for requests", error))?;
        let frames = self.server.cache.shared_frames();
        let FramePlace { memory, offset_bytes, length_bytes } =
            frames.map_err(|error| Failure::of(&error).into_error())?;
        let served = Arc::new(Served::new(Ring { area }));
        for _ in 0..WORKERS {
            let worker = Arc::clone(&served);
            let name = "share-worker".to_owned();
            let started = thread::Builder::new().name(name).spawn(move || worker.run());
            if let Err(error) = started {
                served.end();
                return Err(Error::system("a thread", error));
            }
        }
        let hello = Message::new(wire::HELLO, &[wire::VERSION, offset_bytes, length_bytes]);
        let descriptors = [memory.as_fd(), served.ring.area.descriptor()];
        if let Err(error) = wire::send(self.socket.as_fd(), &hello, &descriptors) {
            served.end();
            return Err(Error::system("the socket", error));
        }
        Ok(served)
    }

    /// Answers messages until the client ends.
    fn serve(&self, served: &Served) -> io::Result<()> {
        // Without it only the socket tells of the end.
        let process = socket_peercred(&*self.socket).ok().map(|peer| peer.pid);
        let process = process.and_then(process_of);
        while self.wait_for_message(process.as_ref())? {
            let Some((message, descriptors)) = wire::receive(self.socket.as_fd())? else { break };
            let answer = match message.kind {
                wire::OPEN => self.open(served, &message, descriptors),
                wire::CLOSE => {
                    drop(served.remove_file(message.words[0]));
                    Ok(Message::new(wire::CLOSED, &[]))
                }
                kind => Err(Failure::invalid(format!("{kind} is no message of a client"))),
            };
            let answer = answer.unwrap_or_else(|failure| Message::failed(&failure));
            wire::send(self.socket.as_fd(), &answer, &[])?;
        }
        Ok(())
    }

    /// Waits until the socket has a message or has ended. Returns `false` if the process of the
    /// client has ended and left no message.
    fn wait_for_message(&self, process: Option<&OwnedFd>) -> io::Result<bool> {
        let mut polled = vec![PollFd::new(&*self.socket, PollFlags::IN)];
        polled.extend(process.map(|process| PollFd::new(process, PollFlags::IN)));
        loop {
            match poll(&mut polled, None) {
                Err(Errno::INTR) => {}
                answer => {
                    answer?;
                    return Ok(!polled[0].revents().is_empty());
                }
            }
        }
    }

    fn open(
        &self,
        served: &Served,
        message: &Message,
        descriptors: Vec<OwnedFd>,
    ) -> std::result::Result<Message, Failure> {
        let Ok([descriptor]) = <[OwnedFd; 1]>::try_from(descriptors) else {
            return Err(Failure::invalid("an open has one descriptor"));
        };
        let flags = message.words[0];
        let options = OpenOptions::new().read(flags & wire::OPEN_READ != 0);
        let options = options.write(flags & wire::OPEN_WRITE != 0);
        let file = self.server.cache.open_fd(descriptor, &options);
        let file = file.map_err(|error| Failure::of(&error))?;
        let place = file.shared_place();
        let too_many = || Failure::invalid(format!("a client has at most {FILES_MAX} files open"));
        let number = served.add_file(file).ok_or_else(too_many)?;
        // Without Entries, all reads are requests.
        let (hot, entries, count) = place
            .map_or((0, 0, 0), |place| (place.hot_offset, place.entries_offset, place.entries));
        Ok(Message::new(wire::OPENED, &[number, hot, entries, count]))
    }
}

/// Returns a descriptor that tells of the end of a process; `None` if the kernel has none.
pub(crate) fn process_of(process: Pid) -> Option<OwnedFd> {
    pidfd_open(process, PidfdFlags::empty()).ok()
}

/// Returns the error of a connection that the owner refused.
pub(crate) fn refused(failure: Failure) -> Error {
    Error::new(ErrorKind::Refused, failure.text)
}

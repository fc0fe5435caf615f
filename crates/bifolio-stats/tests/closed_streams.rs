//! A program that has closed its standard streams: a message to one of them reaches no client.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bifolio::Cache;
use nix::unistd::{close, dup, dup2_stderr, dup2_stdin, dup2_stdout};

/// Alone in its program: the streams belong to the process.
#[test]
fn no_socket_becomes_a_standard_stream() {
    let cache = Cache::builder().memory(1 << 20).build().unwrap();
    let kept = [dup(std::io::stdin()), dup(std::io::stdout()), dup(std::io::stderr())];
    let [stdin, stdout, stderr] = kept.map(Result::unwrap);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    (0..3).for_each(|stream| close(stream).unwrap());
    let is_closed = || (0..3).all(|stream| std::fs::read_link(path_of(stream)).is_err());
    let local = bifolio_stats::serve(&cache, "closed").unwrap();
    let mut are_closed = vec![is_closed()];
    let network = bifolio_stats::serve_on(&cache, listener, "closed").unwrap();
    are_closed.push(is_closed());
    let mut answers = Vec::new();
    {
        // Above the streams, like those of another process.
        let occupied = [0; 3].map(|_| std::fs::File::open("/").unwrap());
        let mut clients: [Box<dyn Client>; 2] = [
            Box::new(UnixStream::connect(local.address()).unwrap()),
            Box::new(TcpStream::connect(network.address()).unwrap()),
        ];
        drop(occupied);
        for client in &mut clients {
            // The server accepts it, and waits for the request.
            std::thread::sleep(Duration::from_millis(100));
            are_closed.push(is_closed());
            client.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
            let mut text = String::new();
            client.read_to_string(&mut text).unwrap();
            answers.push(text);
        }
    }
    dup2_stdin(stdin).unwrap();
    dup2_stdout(stdout).unwrap();
    dup2_stderr(stderr).unwrap();
    assert_eq!(are_closed, [true; 4]);
    assert!(answers.iter().all(|text| text.starts_with("HTTP/1.0 200")), "{answers:?}");
}

fn path_of(stream: i32) -> String {
    format!("/proc/self/fd/{stream}")
}

trait Client: Read + Write {}
impl<C: Read + Write> Client for C {}

//! Downloads from a small server in this process, which counts the requests.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use flate2::Compression;
use flate2::write::GzEncoder;
use tempfile::TempDir;

use super::*;

/// A server on the loopback device.
struct Server {
    address: String,
    num_requests: Arc<AtomicUsize>,
}

impl Server {
    /// Serves these files below `/data`, each without its last `cut` bytes, although the announced length
    /// includes them.
    fn with(files: Vec<(&'static str, Vec<u8>)>, cut: usize) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = format!("http://{}/data", listener.local_addr().unwrap());
        let num_requests = Arc::new(AtomicUsize::new(0));
        let (files, counter) = (HashMap::<_, _>::from_iter(files), num_requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                let request = lines.next().unwrap().unwrap();
                while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
                counter.fetch_add(1, Ordering::Relaxed);
                let path = request.split(' ').nth(1).unwrap().strip_prefix("/data/").unwrap();
                let (status, body) = match files.get(path) {
                    Some(body) => ("200 OK", &body[..]),
                    None => ("404 Not Found", &b"no such file"[..]),
                };
                let head = format!(
                    "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                    body.len()
                );
                let sent = &body[..body.len() - cut.min(body.len())];
                // The client may have closed the connection.
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(sent));
            }
        });
        Self { address, num_requests }
    }

    fn num_requests(&self) -> usize {
        self.num_requests.load(Ordering::Relaxed)
    }
}

/// Two files, whose checksums are those that `md5sum` prints.
static TWO: Source = Source {
    address: "https://example.org",
    subfolder: "raw",
    items: &[
        item("a.gz", "5d41402abc4b2a76b9719d911017c592"), // hello
        item("b.gz", "7d793037a0760186574b0282f2f435e7"), // world
    ],
};

const fn item(name: &'static str, md5: &'static str) -> Item {
    Item { name, md5, max_bytes: MAX_BYTES, members: &[] }
}

/// More bytes than any file here has.
const MAX_BYTES: u64 = 1 << 16;

fn hello_world() -> Vec<(&'static str, Vec<u8>)> {
    vec![("a.gz", b"hello".to_vec()), ("b.gz", b"world".to_vec())]
}

/// All files below a folder, sorted.
fn contents(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            names.extend(contents(&path).iter().map(|inner| format!("{name}/{inner}")));
            names.push(name + "/");
        } else {
            names.push(name);
        }
    }
    names.sort();
    names
}

#[track_caller]
fn refused(outcome: Result<(), String>, words: &[&str]) {
    let message = outcome.unwrap_err();
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
}

#[test]
fn files_are_fetched_once() {
    let server = Server::with(hello_world(), 0);
    let folder = TempDir::new().unwrap();
    let data = folder.path().join("new/data");
    TWO.fetch(&server.address, &data, true).unwrap();
    assert_eq!(contents(&data), ["a.gz", "b.gz"]);
    assert_eq!(fs::read(data.join("a.gz")).unwrap(), b"hello");
    assert_eq!(server.num_requests(), 2);
    TWO.fetch(&server.address, &data, true).unwrap();
    assert_eq!(server.num_requests(), 2, "they are there");
    // Files that are unpacked, or in the subfolder, are not fetched again. Only missing files are.
    fs::create_dir(data.join("raw")).unwrap();
    fs::rename(data.join("a.gz"), data.join("raw/a")).unwrap();
    fs::remove_file(data.join("b.gz")).unwrap();
    // The address may end in a slash. The partial file of a killed run is overwritten.
    fs::write(data.join("b.gz.partial"), b"something longer than it").unwrap();
    TWO.fetch(&format!("{}/", server.address), &data, true).unwrap();
    assert_eq!(server.num_requests(), 3);
    assert_eq!(contents(&data), ["b.gz", "raw/", "raw/a"]);
    assert_eq!(fs::read(data.join("b.gz")).unwrap(), b"world");
}

#[test]
fn what_fails_leaves_nothing_and_says_what_to_do() {
    let folder = TempDir::new().unwrap();
    let data = folder.path().join("new/data");
    let fetch = |server: &Server| TWO.fetch(&server.address, &data, true);
    let yourself = ["--mirror", "put a.gz, b.gz into"];

    let wrong = Server::with(vec![("a.gz", b"hullo".to_vec()), ("b.gz", b"world".to_vec())], 0);
    refused(fetch(&wrong), &yourself);
    refused(fetch(&wrong), &["/data/a.gz sends is not the published file", "5d41402abc4b2a76b9"]);
    let endless = vec![0; 4 * MAX_BYTES as usize];
    let long = Server::with(vec![("a.gz", endless), ("b.gz", b"world".to_vec())], 0);
    refused(
        fetch(&long),
        &["/data/a.gz sends is not the published file", "longer than 65536 bytes"],
    );
    refused(fetch(&Server::with(Vec::new(), 0)), &["cannot fetch http://", "/data/a.gz", "404"]);
    refused(fetch(&Server::with(hello_world(), 2)), &["/data/a.gz"]);
    refused(
        TWO.fetch("http://127.0.0.1:1", &data, true),
        &["cannot fetch http://127.0.0.1:1/a.gz"],
    );
    assert_eq!(contents(folder.path()), [""; 0]);

    // Files that came before the failure are kept, and are not fetched again.
    refused(fetch(&Server::with(hello_world().drain(..1).collect(), 0)), &["/data/b.gz", "404"]);
    assert_eq!(contents(&data), ["a.gz"]);
    let again = fetch(&Server::with(Vec::new(), 0));
    refused(again, &["/data/b.gz", "put b.gz into"]);

    // Something else is in the way.
    fs::write(folder.path().join("file"), b"").unwrap();
    let below = folder.path().join("file/data");
    refused(TWO.fetch("http://127.0.0.1:1", &below, true), &["cannot make the folder"]);
}

#[test]
fn many_that_want_the_same_file_fetch_it_once() {
    let server = Server::with(hello_world(), 0);
    let folder = TempDir::new().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| TWO.fetch(&server.address, folder.path(), true).unwrap());
        }
    });
    assert_eq!(server.num_requests(), 2);
    assert_eq!(contents(folder.path()), ["a.gz", "b.gz"]);
}

/// An archive with these files in a folder.
fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    for (path, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, path, *bytes).unwrap();
    }
    builder.into_inner().unwrap().finish().unwrap()
}

/// A source of one archive with these bytes.
fn archived(bytes: &[u8]) -> Source {
    let md5: String = Md5::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let item = Item { members: &["one.bin", "two.bin"], ..item("all.tar.gz", md5.leak()) };
    Source {
        address: "https://example.org",
        subfolder: "unpacked",
        items: Box::leak(Box::new([item])),
    }
}

#[test]
fn archives_are_unpacked() {
    let bytes = archive(&[("dir/two.bin", b"2"), ("dir/readme.html", b"-"), ("dir/one.bin", b"1")]);
    let source = archived(&bytes);
    let server = Server::with(vec![("all.tar.gz", bytes)], 0);
    let folder = TempDir::new().unwrap();
    source.fetch(&server.address, folder.path(), true).unwrap();
    assert_eq!(contents(folder.path()), ["unpacked/", "unpacked/one.bin", "unpacked/two.bin"]);
    assert_eq!(fs::read(folder.path().join("unpacked/two.bin")).unwrap(), b"2");
    source.fetch(&server.address, folder.path(), true).unwrap();
    assert_eq!(server.num_requests(), 1);
    // If a file of the archive is missing, the archive is fetched again.
    fs::remove_file(folder.path().join("unpacked/one.bin")).unwrap();
    source.fetch(&server.address, folder.path(), true).unwrap();
    assert_eq!(server.num_requests(), 2);
    assert_eq!(contents(folder.path()), ["unpacked/", "unpacked/one.bin", "unpacked/two.bin"]);
}

#[test]
fn archives_that_are_not_what_they_should_be() {
    for (bytes, problem) in [
        (archive(&[("dir/one.bin", b"1")]), "does not hold all of one.bin, two.bin"),
        (b"no archive at all".to_vec(), "cannot unpack all.tar.gz into"),
    ] {
        let source = archived(&bytes);
        let server = Server::with(vec![("all.tar.gz", bytes)], 0);
        let folder = TempDir::new().unwrap();
        let outcome = source.fetch(&server.address, folder.path(), true);
        refused(outcome, &[problem, "put all.tar.gz into", "yourself, unpacked,"]);
        assert!(!folder.path().join("all.tar.gz.partial").exists());
    }
}

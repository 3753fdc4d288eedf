//! A small server that answers as the Hugging Face Hub does: lists of files, their bytes, parts of them. Large files
//! come from another host. It notes each request, and fails on demand.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::json;
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The commit of each repository here.
pub const COMMIT: &str = "00112233445566778899aabbccddeeff00112233";

/// What the server has, and what it does.
#[derive(Default)]
pub struct Contents {
    pub repos: Vec<Repo>,
    /// Files by their address, which are no part of the Hub.
    pub others: Vec<(String, Vec<u8>)>,
    /// Bytes of each of the next large files before the connection breaks.
    pub cuts: VecDeque<usize>,
    pub knows_no_ranges: bool,
    /// Whether large files have other bytes than listed.
    pub lies: bool,
    /// Where large files are, if not on another host.
    pub large_at: Option<String>,
    /// The size that each large file is listed with, if not its own.
    pub listed_bytes: Option<u64>,
    /// The status of everything.
    pub status: Option<(&'static str, &'static str)>,
    pub requests: Vec<Request>,
}

/// A request.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub path: String,
    pub range: Option<String>,
    pub authorization: Option<String>,
    pub num_sent: usize,
}

/// A model or a data set.
pub struct Repo {
    /// As the Hub's interface names it, such as `models/OWNER/NAME`.
    pub path: &'static str,
    pub files: Vec<(&'static str, Vec<u8>)>,
}

pub struct Hub {
    pub address: String,
    /// Another port of the same host, where the same files are.
    pub other_port: String,
    contents: Arc<Mutex<Contents>>,
}

impl Hub {
    /// Serves `repos` until the process ends.
    pub fn with(repos: Vec<Repo>) -> Self {
        let contents = Arc::new(Mutex::new(Contents { repos, ..Contents::default() }));
        let listen = |host: &str| TcpListener::bind((host, 0)).unwrap();
        let (hub, large) = (listen("127.0.0.1"), listen("127.0.0.2"));
        let address = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let other_port = listen("127.0.0.1");
        let (address, other_port_address) = (address(&hub), address(&other_port));
        let of_large = format!("http://{}", large.local_addr().unwrap());
        for listener in [hub, large, other_port] {
            let (contents, of_large) = (contents.clone(), of_large.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let (contents, of_large) = (contents.clone(), of_large.clone());
                    std::thread::spawn(move || answer(stream.unwrap(), &contents, &of_large));
                }
            });
        }
        Self { address, other_port: other_port_address, contents }
    }

    pub fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap()
    }

    /// The requests since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.contents().requests)
    }

    /// Those of them that were for bytes of large files.
    pub fn large_requests(&self) -> Vec<Request> {
        self.requests().into_iter().filter(|request| request.path.starts_with("/large/")).collect()
    }
}

/// Whether the Hub keeps a file as a large one.
pub fn is_large(path: &str) -> bool {
    [".safetensors", ".bin", ".parquet"].iter().any(|end| path.ends_with(end))
}

/// The digest by which a file is listed.
pub fn digest(path: &str, bytes: &[u8]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    if is_large(path) {
        hex(&Sha256::digest(bytes))
    } else {
        hex(&Sha1::new()
            .chain_update(format!("blob {}\0", bytes.len()))
            .chain_update(bytes)
            .finalize())
    }
}

fn answer(mut stream: TcpStream, contents: &Mutex<Contents>, of_large: &str) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let mut request =
        Request { path: first.split(' ').nth(1).unwrap().into(), ..Request::default() };
    for line in lines.take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(": ").unwrap();
        match name.to_ascii_lowercase().as_str() {
            "range" => request.range = Some(value.into()),
            "authorization" => request.authorization = Some(value.into()),
            _ => {}
        }
    }
    let mut contents = contents.lock().unwrap();
    let (head, body) = response(&mut contents, &request, of_large);
    let is_body = request.path.starts_with("/large/") && !body.is_empty();
    let cut = if is_body { contents.cuts.pop_front() } else { None };
    request.num_sent = cut.unwrap_or(body.len()).min(body.len());
    let sent = request.num_sent;
    contents.requests.push(request);
    drop(contents);
    let head =
        format!("HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    // The client may have closed the connection.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body[..sent]));
}

/// The status with further headers, and the body.
fn response(contents: &mut Contents, request: &Request, of_large: &str) -> (String, Vec<u8>) {
    if let Some((status, code)) = contents.status {
        return (format!("{status}\r\nX-Error-Code: {code}"), b"no".to_vec());
    }
    let path = request.path.split('?').next().unwrap();
    if let Some((_, bytes)) = contents.others.iter().find(|(at, _)| at == path) {
        return ("200 OK".into(), bytes.clone());
    }
    for repo in &contents.repos {
        let of_repo = repo.path.strip_prefix("models/").unwrap_or(repo.path);
        if let Some(revision) = path.strip_prefix(&format!("/api/{}/revision/", repo.path)) {
            if revision != "main" && revision != COMMIT {
                return ("404 Not Found\r\nX-Error-Code: RevisionNotFound".into(), Vec::new());
            }
            let file = |(path, bytes): &(&str, Vec<u8>)| {
                let (digest, mut size) = (digest(path, bytes), bytes.len() as u64);
                if is_large(path) {
                    size = contents.listed_bytes.unwrap_or(size);
                }
                if is_large(path) {
                    json!({
                        "rfilename": path, "size": size, "blobId": COMMIT,
                        "lfs": {"sha256": digest, "size": size, "pointerSize": 134}
                    })
                } else {
                    json!({"rfilename": path, "size": size, "blobId": digest})
                }
            };
            let files: Vec<_> = repo.files.iter().map(file).collect();
            return ("200 OK".into(), json!({"sha": COMMIT, "siblings": files}).to_string().into());
        }
        let resolved = path.strip_prefix(&format!("/{of_repo}/resolve/{COMMIT}/"));
        let large = path.strip_prefix(&format!("/large/{of_repo}/"));
        let wanted = resolved.or(large);
        let Some((path, bytes)) = repo.files.iter().find(|(path, _)| Some(*path) == wanted) else {
            continue;
        };
        if resolved.is_some() && is_large(path) {
            let of_large = contents.large_at.as_deref().unwrap_or(of_large);
            let location = format!("{of_large}/large/{of_repo}/{path}");
            return (format!("302 Found\r\nLocation: {location}"), Vec::new());
        }
        let mut bytes = bytes.clone();
        if contents.lies && is_large(path) {
            bytes[0] ^= 1;
        }
        let from = request.range.as_deref().filter(|_| !contents.knows_no_ranges);
        return match from {
            Some(range) => {
                let from = range.strip_prefix("bytes=").unwrap().trim_end_matches('-');
                let from: usize = from.parse().unwrap();
                let (last, len) = (bytes.len() - 1, bytes.len());
                let status =
                    format!("206 Partial Content\r\nContent-Range: bytes {from}-{last}/{len}");
                (status, bytes.split_off(from))
            }
            None => ("200 OK".into(), bytes),
        };
    }
    ("404 Not Found\r\nX-Error-Code: RepoNotFound".into(), Vec::new())
}

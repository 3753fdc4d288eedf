//! The Hub as a server: which files a revision has, and their bytes.
//!
//! Errors say what to do. This module writes nothing.

use std::io::Read;
use std::path::PathBuf;

use serde_json::Value;
use tracing::debug;
use ureq::Agent;
use ureq::http::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_RANGE, LOCATION, RANGE};
use ureq::http::{HeaderMap, StatusCode, Uri};

use super::cache::{home, is_inner_path, is_yes};
use super::name::{Kind, Name, is_commit};
use crate::download::http::{self, Rate};

const ENDPOINT: &str = "https://huggingface.co";
const MAX_LISTING_BYTES: u64 = 64 << 20;
const MAX_REDIRECTS: usize = 10;

pub(super) struct Hub {
    pub endpoint: String,
    token: Option<String>,
    agent: Agent,
}

/// Why the Hub has not answered a request.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It cannot be reached, or cannot answer now.
    Unreachable(String),
    /// It can be reached, and something has to be done.
    Refused(String),
}

#[derive(Debug)]
pub(super) struct Listing {
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    pub path: String,
    pub num_bytes: u64,
    /// The hexadecimal digest, also the file's name in the cache: SHA-256 for large files, otherwise git's 40 digits of length
    /// and bytes.
    pub digest: String,
}

impl Hub {
    /// The Hub of `huggingface_hub`'s variables, with the user's token.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        if !["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme)) {
            return Err(format!(
                "HF_ENDPOINT {endpoint}: set it to an address that begins with https://"
            ));
        }
        let token = if is_yes(var("HF_HUB_DISABLE_IMPLICIT_TOKEN")) { None } else { token(&var) };
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        Ok(Self { endpoint, token, agent: http::agent(false) })
    }

    /// The files of a name at its revision.
    pub fn listing(&self, name: &Name) -> Result<Listing, Trouble> {
        let url = format!(
            "{}/api/{}/{}/revision/{}?blobs=true",
            self.endpoint,
            name.kind.plural(),
            name.path,
            encoded(&name.revision, "")
        );
        let response = self.get(&url, None)?;
        if response.status() != StatusCode::OK {
            return Err(self.trouble(name, &url, response.status(), response.headers()));
        }
        let body = response.into_body().into_with_config().limit(MAX_LISTING_BYTES).reader();
        let cannot = |e| Trouble::Unreachable(format!("cannot read {url}: {e}"));
        let mut rate = Rate::new();
        let text: Result<Vec<_>, _> = rate.watch(body).map_err(cannot)?.collect();
        let json = serde_json::from_slice(&text.map_err(cannot)?.concat()).ok();
        json.as_ref().and_then(listing).ok_or_else(|| {
            Trouble::Refused(format!(
                "{url} does not answer as the Hugging Face Hub does: it names no commit, or files without digests"
            ))
        })
    }

    /// The bytes of a file from `offset` on, or all if the server knows no ranges; and where they begin.
    pub fn open(
        &self,
        name: &Name,
        commit: &str,
        file: &RemoteFile,
        offset: u64,
    ) -> Result<(u64, impl Read + Send + 'static), Trouble> {
        let url = format!("{}/resolve/{commit}/{}", self.page(name), encoded(&file.path, "/"));
        let response = self.get(&url, (offset > 0).then_some(offset))?;
        let begins_there = || {
            let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
            Some(range.strip_prefix("bytes ")?.split_once('-')?.0 == offset.to_string())
        };
        let offset = match response.status() {
            StatusCode::OK => 0,
            StatusCode::PARTIAL_CONTENT if offset > 0 && begins_there() == Some(true) => offset,
            status => return Err(self.trouble(name, &url, status, response.headers())),
        };
        Ok((offset, response.into_body().into_reader()))
    }

    /// The page of a name, for people and as the folder of its files.
    fn page(&self, name: &Name) -> String {
        let folder = if name.kind == Kind::Model { "" } else { "datasets/" };
        format!("{}/{folder}{}", self.endpoint, name.path)
    }

    /// Follows redirects. The token goes only to the Hub's own scheme, host and port: another port may be another user's.
    fn get(
        &self,
        url: &str,
        offset: Option<u64>,
    ) -> Result<ureq::http::Response<ureq::Body>, Trouble> {
        let cannot =
            |e: &dyn std::fmt::Display| Trouble::Unreachable(format!("cannot fetch {url}: {e}"));
        let mut address: Uri = url.parse().map_err(|e| cannot(&e))?;
        let hub = self.endpoint.parse().ok().and_then(|hub| origin(&hub));
        for _ in 0..=MAX_REDIRECTS {
            // Without compression, since bytes are counted and hashed.
            let mut request = self.agent.get(&address).header(ACCEPT_ENCODING, "identity");
            if let Some(token) = self.token.as_ref().filter(|_| hub == origin(&address)) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some(offset) = offset {
                request = request.header(RANGE, format!("bytes={offset}-"));
            }
            let response = request.call().map_err(|e| cannot(&e))?;
            // Without the query, which may be a signature.
            let host = address.host().unwrap_or_default();
            debug!("{host}{}: status {}", address.path(), response.status());
            let location = response
                .headers()
                .get(LOCATION)
                .filter(|_| [301, 302, 303, 307, 308].contains(&response.status().as_u16()));
            let Some(location) = location else { return Ok(response) };
            let next = location.to_str().ok().and_then(|location| redirected(&address, location));
            let unknown = || {
                cannot(&format!(
                    "it redirects to {location:?}, which is not a valid address; check HF_ENDPOINT"
                ))
            };
            address = next.ok_or_else(unknown)?;
        }
        Err(cannot(&format!("it redirects more than {MAX_REDIRECTS} times")))
    }

    /// The meaning of a status, and what to do.
    fn trouble(&self, name: &Name, url: &str, status: StatusCode, headers: &HeaderMap) -> Trouble {
        let ([kind, _], page) = (name.kind.names(), self.page(name));
        let code = headers.get("X-Error-Code").and_then(|code| code.to_str().ok());
        let is_known = self.token.is_some();
        let token = "a token (https://huggingface.co/settings/tokens)";
        Trouble::Refused(match (status.as_u16(), code) {
            (401 | 403, Some("GatedRepo")) if is_known => format!(
                "this {kind} is gated, and the token may not read it; accept its terms on {page}, and use a token of the \
                 same account"
            ),
            (401 | 403, Some("GatedRepo")) => format!(
                "this {kind} is gated; accept its terms on {page}, then set HF_TOKEN to {token}"
            ),
            (404, Some("RevisionNotFound")) => format!(
                "{page} has no revision {}; pass another --revision, or leave it out",
                name.revision
            ),
            // The Hub also says 401 for things that do not exist.
            (401 | 403 | 404, _) if is_known => format!(
                "there is no {kind} {}, or the token may not read it (status {status} of {url}); check the name, \
                 which has the form OWNER/NAME, and the token",
                name.path
            ),
            (401 | 403 | 404, _) => format!(
                "there is no {kind} {}, or it is private (status {status} of {url}); check the name, which has the \
                 form OWNER/NAME, or set HF_TOKEN to {token}",
                name.path
            ),
            (429, _) => format!(
                "{} has had too many requests from here; wait some minutes, or set HF_TOKEN to {token}",
                self.endpoint
            ),
            (500.., _) => {
                return Trouble::Unreachable(format!("{url} has failed with status {status}"));
            }
            _ => format!("{url} answers with status {status}, which no file of the Hub does"),
        })
    }
}

/// The most bytes of the file with the token.
const MAX_TOKEN_BYTES: u64 = 4096;

/// The scheme, host and port of an address, if it has all.
fn origin(address: &Uri) -> Option<(String, String, u16)> {
    let scheme = address.scheme_str()?.to_ascii_lowercase();
    let default = match scheme.as_str() {
        "https" => 443,
        "http" => 80,
        _ => return None,
    };
    let port = address.port_u16().unwrap_or(default);
    Some((scheme, address.host()?.to_ascii_lowercase(), port))
}

/// Where a redirect leads to, if that is a web server.
fn redirected(from: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next()?;
    let (scheme, authority) = (from.scheme_str()?, from.authority()?);
    let has_scheme = location.split(['/', '?']).next().is_some_and(|first| first.contains(':'));
    let address = if has_scheme {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{location}")
    };
    address.parse().ok().filter(|address| origin(address).is_some())
}

/// The user's token, from the variables or the file that `hf auth login` writes.
fn token(var: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let stated = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].into_iter().find_map(var);
    let of_file = || {
        let path = var("HF_TOKEN_PATH").map(Into::into);
        let path: PathBuf = path.or_else(|| Some(home(var)?.join("token")))?;
        paceline_files::read_text(&path, MAX_TOKEN_BYTES).ok()
    };
    let token = stated.or_else(of_file)?.trim().to_owned();
    // Nothing else can be in a header.
    (!token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic())).then_some(token)
}

/// Reads the Hub's description of a revision.
fn listing(json: &Value) -> Option<Listing> {
    let commit = json["sha"].as_str().filter(|sha| is_commit(sha))?.to_owned();
    let files = json["siblings"].as_array()?.iter().map(file).collect::<Option<Vec<_>>>()?;
    Some(Listing { commit, files })
}

fn file(json: &Value) -> Option<RemoteFile> {
    let path = json["rfilename"].as_str().filter(|path| is_inner_path(path))?.to_owned();
    let digits = |value: &Value, len: usize| {
        let digits = value.as_str().filter(|digits| digits.len() == len)?.to_ascii_lowercase();
        digits.bytes().all(|byte| byte.is_ascii_hexdigit()).then_some(digits)
    };
    let (num_bytes, digest) = match &json["lfs"] {
        Value::Null => (&json["size"], digits(&json["blobId"], 40)?),
        large => (&large["size"], digits(&large["sha256"], 64)?),
    };
    Some(RemoteFile { path, num_bytes: num_bytes.as_u64()?, digest })
}

/// A part of an address, escaped except for letters, digits and `also`.
fn encoded(text: &str, also: &str) -> String {
    let keeps = |byte: u8| {
        byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || also.as_bytes().contains(&byte)
    };
    let escape =
        |byte: u8| if keeps(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_listing_has_a_commit_and_a_digest_of_each_file() {
        let (sha, digest) = ("0123456789abcdef0123456789abcdef01234567", "AB".repeat(32));
        let small = json!({"rfilename": "a/b.csv", "size": 7, "blobId": sha});
        let large = json!({
            "rfilename": "w", "size": 9, "blobId": sha, "lfs": {"sha256": digest, "size": 9, "pointerSize": 1}
        });
        let found = listing(&json!({"sha": sha, "siblings": [small, large]})).unwrap();
        assert_eq!(found.commit, sha);
        assert_eq!(found.files[0].digest, sha);
        assert_eq!(found.files[1].digest, "ab".repeat(32));
        for wrong in [
            json!({"rfilename": "../b", "size": 7, "blobId": sha}),
            json!({"rfilename": "b", "size": 7}),
            json!({"rfilename": "b", "size": 7, "blobId": "../../../../../../../../../../../etc/pass"}),
            json!({"rfilename": "b", "blobId": sha}),
        ] {
            assert!(listing(&json!({"sha": sha, "siblings": [wrong]})).is_none(), "{wrong}");
        }
        assert!(listing(&json!({"sha": "main", "siblings": []})).is_none());
        assert!(listing(&json!([])).is_none());
    }

    #[test]
    fn redirects_lead_where_browsers_go() {
        let from: Uri = "https://hub.example/a/resolve/b?c".parse().unwrap();
        let to = |location| redirected(&from, location).map(|address| address.to_string());
        let cases = [
            ("https://cdn.example:8/x#y", Some("https://cdn.example:8/x")),
            ("//cdn.example/x", Some("https://cdn.example/x")),
            ("/new/name?x=1:2", Some("https://hub.example/new/name?x=1:2")),
            ("other", Some("https://hub.example/a/resolve/other")),
            ("file:///etc/passwd", None),
            ("ftp://a/b", None),
        ];
        for (location, expected) in cases {
            assert_eq!(to(location).as_deref(), expected, "{location}");
        }
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let is_same = |one: &str, other: &str| {
            let [one, other] = [one, other].map(|address| origin(&address.parse().unwrap()));
            one.is_some() && one == other
        };
        assert!(is_same("https://a", "https://A:443/b"));
        assert!(!is_same("https://a", "http://a") && !is_same("https://a", "https://b"));
        assert!(!is_same("http://127.0.0.1:8080", "http://127.0.0.1:8081"));
        assert!(!is_same("https://a", "https://a@b"));
    }

    #[test]
    fn addresses_are_escaped() {
        assert_eq!(encoded("refs/pr/1", ""), "refs%2Fpr%2F1");
        assert_eq!(encoded("a b/\u{e9}.csv", "/"), "a%20b/%C3%A9.csv");
    }

    #[test]
    fn the_token_comes_from_the_variable_or_from_the_file() {
        let folder = tempfile::TempDir::new().unwrap();
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let home = folder.path().display().to_string();
        let token_with = |vars: &[(&str, &str)]| {
            token(&|name: &str| {
                vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(token_with(&[("HF_HOME", &home)]).as_deref(), Some("hf_file"));
        assert_eq!(
            token_with(&[("HF_HOME", &home), ("HF_TOKEN", "hf_v")]).as_deref(),
            Some("hf_v")
        );
        assert_eq!(token_with(&[("HF_HOME", "/nowhere")]), None);
        assert_eq!(token_with(&[("HF_TOKEN", "two\r\nlines")]), None);
    }
}

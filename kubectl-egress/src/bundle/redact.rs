//! What must not leave the cluster: credentials in objects, in arguments and in logs. Pure.
//!
//! Secrets are never requested. Credentials elsewhere are found by the name of the variable, field or flag that holds them, and by
//! the shape of the text: keys in PEM, kubeconfigs, bearer tokens, passwords in URLs. What is redacted without need is no harm.

use serde_json::{Map, Value};

pub(crate) const REDACTED: &str = "REDACTED";

/// Parts of names that hold credentials.
const CREDENTIALS: [&str; 9] =
    ["password", "passwd", "token", "secret", "apikey", "privatekey", "accesskey", "credential", "authorization"];
/// Ends of names of references to them, and of settings about them.
const REFERENCES: [&str; 6] = ["name", "namespace", "ref", "file", "path", "seconds"];
/// Text that contains one of these is a credential as a whole.
const WHOLE: [&str; 3] = ["PRIVATE KEY-----", "client-key-data", "client-certificate-data"];
/// The line by which a kubeconfig is known.
const KUBECONFIG: &str = "kind: Config";

/// Whether a variable, field or flag of this name holds a credential.
fn is_credential(name: &str) -> bool {
    let name: String = name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase();
    CREDENTIALS.iter().any(|part| name.contains(part)) && !REFERENCES.iter().any(|end| name.ends_with(end))
}

/// Redacts an object in place, and removes what only repeats it (managed fields, the last applied configuration, image lists).
pub(crate) fn object(value: &mut Value) {
    match value {
        Value::Object(fields) => map(fields),
        Value::Array(items) => items.iter_mut().for_each(object),
        Value::String(string) => *string = text(string),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn map(fields: &mut Map<String, Value>) {
    for repeated in ["managedFields", "kubectl.kubernetes.io/last-applied-configuration", "images"] {
        fields.remove(repeated);
    }
    // A variable of a container.
    if fields.get("name").and_then(Value::as_str).is_some_and(is_credential)
        && let Some(value) = fields.get_mut("value")
    {
        *value = REDACTED.into();
    }
    for (name, value) in fields.iter_mut() {
        match value {
            Value::String(string) if is_credential(name) => REDACTED.clone_into(string),
            value => object(value),
        }
    }
}

/// Redacts a text line by line.
pub(crate) fn text(text: &str) -> String {
    if WHOLE.iter().any(|part| text.contains(part)) || text.lines().any(|line| line.trim() == KUBECONFIG) {
        return REDACTED.to_owned();
    }
    let lines: Vec<String> = text.split('\n').map(line).collect();
    lines.join("\n")
}

/// A log, in which one line with a key must not take the others along.
pub(crate) fn log(log: &str) -> String {
    let lines = log.split('\n').map(|one| match WHOLE.iter().any(|part| one.contains(part)) {
        true => REDACTED.to_owned(),
        false => line(one),
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Redacts words like `--token=X`, `password: X`, `Bearer X` and `https://user:X@host`.
fn line(line: &str) -> String {
    let mut is_value = false;
    let words = line.split(' ').map(|word| {
        if std::mem::take(&mut is_value) && !word.is_empty() {
            // `Authorization: Bearer X` has the value one word later.
            is_value = word == "Bearer";
            return if is_value { word.to_owned() } else { REDACTED.to_owned() };
        }
        if word == "Bearer" || word.strip_suffix(':').is_some_and(is_credential) {
            is_value = true;
            return word.to_owned();
        }
        if word.starts_with("--") && !word.contains('=') && is_credential(word) {
            is_value = true;
            return word.to_owned();
        }
        if let Some((name, _)) = word.split_once('=').filter(|(name, value)| is_credential(name) && !value.is_empty()) {
            return format!("{name}={REDACTED}");
        }
        url(word)
    });
    words.collect::<Vec<_>>().join(" ")
}

fn url(word: &str) -> String {
    let hidden = || {
        let (scheme, rest) = word.split_once("://")?;
        let (user, host) = rest.split_once('@').filter(|(user, _)| user.contains(':') && !user.contains('/'))?;
        let (user, _) = user.split_once(':')?;
        Some(format!("{scheme}://{user}:{REDACTED}@{host}"))
    };
    hidden().unwrap_or_else(|| word.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn variables_fields_and_arguments_with_credentials_are_redacted() {
        let mut pod = json!({
            "metadata": {
                "name": "agent", "managedFields": [1],
                "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "kept": "yes"},
            },
            "spec": {
                "automountServiceAccountToken": true,
                "containers": [{
                    "env": [
                        {"name": "DB_PASSWORD", "value": "hunter2"},
                        {"name": "EGRESS_AGENT_NODE_NAME", "value": "n1"},
                        {"name": "API_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                    ],
                    "args": ["run", "--token=hunter2", "--proxy=http://me:hunter2@proxy:3128", "--health-key-file=/x"],
                }],
                "volumes": [{"name": "tls", "secret": {"secretName": "egress-agent-healthcheck-tls"}}],
            },
            "data": {"accessKey": "hunter2", "agent.conf": "[default]\nmtu=1400"},
        });
        object(&mut pod);
        let text = pod.to_string();
        assert!(!text.contains("hunter2"), "{text}");
        assert!(!text.contains("managedFields") && !text.contains("last-applied"), "{text}");
        for kept in [
            "n1",
            "egress-agent-healthcheck-tls",
            "secretKeyRef",
            "mtu=1400",
            "--health-key-file=/x",
            "proxy:3128",
            "kept",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        assert_eq!(pod["spec"]["automountServiceAccountToken"], true);
    }

    #[test]
    fn kubeconfigs_and_keys_are_redacted_as_a_whole() {
        for secret in [
            "apiVersion: v1\nkind: Config\nusers:\n- user:\n    password: x",
            "users:\n- user:\n    client-key-data: aGVsbG8=",
            "-----BEGIN EC PRIVATE KEY-----\nMHcCAQ\n-----END EC PRIVATE KEY-----",
        ] {
            assert_eq!(text(secret), REDACTED);
        }
        assert_eq!(text("-----BEGIN CERTIFICATE-----\nMII"), "-----BEGIN CERTIFICATE-----\nMII");
    }

    #[test]
    fn a_log_loses_its_credentials_and_no_other_line() {
        let said = "first\nAuthorization: Bearer abc.def\npassword: hunter2 and more\nkey client-key-data: x\nlast a=b";
        let expected = "first\nAuthorization: Bearer REDACTED\npassword: REDACTED and more\nREDACTED\nlast a=b";
        assert_eq!(log(said), expected);
    }
}

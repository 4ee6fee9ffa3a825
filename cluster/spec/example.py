"""A cluster file that names every setting. It stands in docs/cluster-file.md, and lints clean (tests/unit)."""

EXAMPLE = """\
models:
  - name: Qwen/Qwen3-32B
    served_name: qwen3-32b
    aliases: [gpt-4o]
    tenants: [acme, nightly]
    pools:
      prefill:
        min: 1
        max: 8
        start: 2
        shape: {tp: 2, dp: 1, ep: 1, pp: 1}
        gpu: H100-SXM
        engine_args: &args
          max-num-batched-tokens: 8192
          enable-prefix-caching: true
        env: {VLLM_LOGGING_LEVEL: WARNING}
      decode:
        min: 1
        max: 8
        shape: {tp: 4}
        gpu: H200
        engine_args: {<<: *args, max-num-seqs: 256}
      both:
        min: 0
        max: 2
        gpu: H200
        shape: {tp: 4}
        flips: true
        power_cap_w: 600
      extra:
        decode-h100:
          role: decode
          min: 0
          max: 4
          start: 0
          shape: {tp: 4}
          gpu: H100-SXM
          engine_args: {<<: *args, max-num-seqs: 256}
          env: {VLLM_LOGGING_LEVEL: WARNING}
          flips: false
          power_cap_w: 500
slo:
  interactive: {ttft_ms: 500, tt2t_ms: 120, tpot_ms: 40, attainment: 0.95, when_missed: degrade, degrade_to: batch}
  batch: {ttft_ms: 20000, tpot_ms: 200, e2e_ms: 600000, attainment: 0.9, when_missed: queue, lengths_within: 0.2}
tenants:
  acme:
    key_file: keys/acme
    share: 3
    classes: [interactive, batch]
    default_class: interactive
    open_max: 200
    cache_scope: tenant
  nightly: {classes: [batch]}
transfer: {connector: auto, lease_s: 60, digests: false, peers: true}
kv: {host_gib: 64, disk_gib: 512, disk_folder: /var/lib/baton}
registry:
  url: rediss://registry.internal:6379
  password_file: keys/registry
  ca_file: keys/ca.pem
  cluster: default
limits:
  body_bytes_max: 33554432
  answer_bytes_max: 67108864
  uploads_bytes_max: 268435456
  open_bytes_max: 1073741824
  connections_max: 4000
  body_timeout_s: 30
  head_timeout_s: 15
  first_token_s: 300
  stall_s: 120
  client_stall_s: 60
  whole_s: 1800
  drain_s: 30
hardware:
  H100-SXM: {count: 16, price_per_hour: 2.5, power_w: 700, memory_gib: 80}
  H200: {count: 32, price_per_hour: 3.3, power_w: 700, memory_gib: 141}
router:
  host: 0.0.0.0
  port: 8000
  admin_host: 127.0.0.1
  admin_port: 8001
  admin_key_file: keys/admin
  tls_cert_file: keys/router.pem
  tls_key_file: keys/router.key
  policy: workload
  explain_last: 1000
  processes: 1
"""

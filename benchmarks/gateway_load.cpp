// Load on a gateway, and the worker behind it, in one epoll loop.
//
// Owns both ends, so that streams can run in lock-step: the worker side sends the next event of a stream
// only when the client side has received the last one. Prints the worker's port, reads the port to load
// from standard input, prints "begin" after the warm-up and one line of JSON at the end.
//
//   gateway_load post|raw|sse CONNECTIONS SECONDS BODY_BYTES
// LOAD_HEADERS, where it is set, is "\r\nname: value" for each request.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kEvents = 200;        // events of one stream
constexpr int kEventBytes = 190;    // bytes of one event, as engines send them
constexpr double kWarmUp = 0.5;     // seconds

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::exit(1);
}

struct Connection {
  int fd = -1;
  bool is_worker_side = false;
  int stream = -1;        // which client a worker-side connection answers
  std::string in;         // bytes not yet understood
  bool has_head = false;  // client side: the answer's head was read
  long body_left = 0;
  int events = 0;         // client side: received; worker side: sent
  Clock::time_point sent_at;
};

struct Load {
  int epoll = epoll_create1(0);
  bool is_sse, is_raw;
  std::vector<Connection*> clients;
  std::vector<Connection*> workers;  // worker-side connection of each stream
  std::vector<std::string> bodies;  // sent in turn
  std::size_t next_body = 0;
  std::string json_answer, sse_head, sse_event;
  std::string more_headers = std::getenv("LOAD_HEADERS") ? std::getenv("LOAD_HEADERS") : "";
  std::vector<double> latencies_us;
  long done = 0, chunks = 0, failed = 0;
  bool counts = false;

  Load(bool sse, bool raw, int connections, int body_bytes) : is_sse(sse), is_raw(raw), workers(connections, nullptr) {
    std::string text(body_bytes, 'x');
    for (int i = 7; i < body_bytes; i += 8) text[i] = ' ';
    std::string body = "{\"model\":\"m\",\"stream\":";
    body += sse ? "true" : "false";
    body += ",\"messages\":[{\"role\":\"user\",\"content\":\"" + text + "\"}]}";
    if (is_raw) body[0] = 'x';  // an object would be read, whatever its label says
    bodies.push_back(body);
    std::string payload(kEventBytes - 8, 'y');
    std::string answer = "{\"ok\":\"" + std::string(180, 'z') + "\"}";
    json_answer = "HTTP/1.1 200 OK\r\nserver: load\r\ncontent-type: application/json\r\ncontent-length: " +
                  std::to_string(answer.size()) + "\r\n\r\n" + answer;
    sse_head = "HTTP/1.1 200 OK\r\nserver: load\r\ncontent-type: text/event-stream\r\n"
               "transfer-encoding: chunked\r\n\r\n";
    std::string event = "data: " + payload + "\n\n";
    char size[16];
    std::snprintf(size, sizeof size, "%zx\r\n", event.size());
    sse_event = size + event + "\r\n";
  }

  // Bodies made elsewhere, one JSON object a line, in place of our own.
  void read_bodies(const char* path) {
    std::ifstream file(path);
    bodies.clear();
    for (std::string line; std::getline(file, line);) bodies.push_back(line);
    if (bodies.empty()) die("bodies");
  }

  void watch(Connection* c) {
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.ptr = c;
    epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &e);
  }

  void send_all(Connection* c, std::string_view data) {
    while (!data.empty()) {
      ssize_t n = send(c->fd, data.data(), data.size(), MSG_NOSIGNAL);
      if (n < 0 && errno == EAGAIN) continue;  // buffers are far larger than what is sent here
      if (n <= 0) die("send");
      data.remove_prefix(n);
    }
  }

  void ask(Connection* c, int index) {
    c->has_head = false;
    c->events = 0;
    c->in.clear();
    const std::string& body = bodies[next_body++ % bodies.size()];
    c->sent_at = Clock::now();
    std::string head = std::string("POST ") + (is_raw ? "/v1/raw" : "/v1/chat/completions") +
                       " HTTP/1.1\r\nhost: gateway\r\naccept: application/json\r\ncontent-type: " +
                       (is_raw ? "application/octet-stream" : "application/json") +
                       "\r\nuser-agent: load\r\nx-session-id: " + std::to_string(index) + more_headers + "\r\ncontent-length: " + std::to_string(body.size()) + "\r\n\r\n";
    send_all(c, head + body);
  }

  void finish(Connection* c, int index) {
    if (counts) {
      ++done;
      latencies_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - c->sent_at).count());
    }
    ask(c, index);
  }

  void on_worker(Connection* c) {
    while (true) {
      size_t end = c->in.find("\r\n\r\n");
      if (end == std::string::npos) return;
      size_t at = c->in.find("content-length: ");
      if (at == std::string::npos || at > end) at = c->in.find("Content-Length: ");
      size_t length = at < end ? std::strtoul(c->in.c_str() + at + 16, nullptr, 10) : 0;
      if (c->in.size() < end + 4 + length) return;
      size_t id = c->in.find("x-session-id: ");
      c->stream = id < end ? std::atoi(c->in.c_str() + id + 14) : 0;
      c->in.erase(0, end + 4 + length);
      if (!is_sse) {
        send_all(c, json_answer);
        continue;
      }
      workers[c->stream] = c;
      c->events = 1;
      send_all(c, sse_head + sse_event);
    }
  }

  void next_event(int index) {
    Connection* w = workers[index];
    if (w->events == kEvents) {
      send_all(w, "0\r\n\r\n");
      ++w->events;
    } else if (w->events < kEvents) {
      ++w->events;
      send_all(w, sse_event);
    }
  }

  void on_client(Connection* c, int index) {
    if (!c->has_head) {
      size_t end = c->in.find("\r\n\r\n");
      if (end == std::string::npos) return;
      if (c->in.compare(9, 3, "200") != 0) {
        ++failed;
        std::fprintf(stderr, "%.*s\n", 300, c->in.c_str());
        std::exit(1);
      }
      size_t at = c->in.find("ontent-length: ");
      if (at == std::string::npos) at = c->in.find("ontent-Length: ");
      c->body_left = at < end ? std::atol(c->in.c_str() + at + 15) : 0;
      c->in.erase(0, end + 4);
      c->has_head = true;
    }
    if (!is_sse) {
      if (static_cast<long>(c->in.size()) >= c->body_left) finish(c, index);
      return;
    }
    size_t at = 0, event_end;
    while ((event_end = c->in.find("\n\n", at)) != std::string::npos) {
      at = event_end + 2;
      ++c->events;
      if (counts) ++chunks;
      next_event(index);
    }
    c->in.erase(0, at);
    size_t n = c->in.size();
    if (c->events >= kEvents && n >= 5 && c->in.compare(n - 5, 5, "0\r\n\r\n") == 0) finish(c, index);
  }
};

int listener(int* port) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0 || listen(fd, 4096) < 0) die("listen");
  socklen_t size = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  *port = ntohs(address.sin_port);
  return fd;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) return 2;
  const int connections = std::atoi(argv[2]);
  const double seconds = std::atof(argv[3]);
  Load load(std::strcmp(argv[1], "sse") == 0, std::strcmp(argv[1], "raw") == 0, connections, std::atoi(argv[4]));
  if (argc == 6) load.read_bodies(argv[5]);
  int port = 0;
  int listen_fd = listener(&port);
  std::printf("%d\n", port);
  std::fflush(stdout);
  int target = 0;
  if (std::scanf("%d", &target) != 1) return 2;
  if (target == 0) target = port;

  epoll_event e{};
  e.events = EPOLLIN;
  e.data.ptr = nullptr;
  epoll_ctl(load.epoll, EPOLL_CTL_ADD, listen_fd, &e);
  for (int i = 0; i < connections; ++i) {
    auto* c = new Connection;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(target);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(c->fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) die("connect");
    c->stream = i;
    load.clients.push_back(c);
    load.watch(c);
    load.ask(c, i);
  }

  auto started = Clock::now();
  std::vector<epoll_event> ready(512);
  std::vector<char> buffer(1 << 18);
  double elapsed = 0;
  while (true) {
    double now = std::chrono::duration<double>(Clock::now() - started).count();
    if (!load.counts && now > kWarmUp) {
      load.counts = true;
      started = Clock::now();
      std::printf("begin\n");
      std::fflush(stdout);
      now = 0;
    }
    if (load.counts && now > seconds) {
      elapsed = now;
      break;
    }
    int n = epoll_wait(load.epoll, ready.data(), static_cast<int>(ready.size()), 50);
    for (int i = 0; i < n; ++i) {
      auto* c = static_cast<Connection*>(ready[i].data.ptr);
      if (c == nullptr) {
        auto* fresh = new Connection;
        fresh->fd = accept(listen_fd, nullptr, nullptr);
        fresh->is_worker_side = true;
        load.watch(fresh);
        continue;
      }
      ssize_t got = recv(c->fd, buffer.data(), buffer.size(), 0);
      if (got <= 0) {
        if (got < 0 && errno == EAGAIN) continue;
        if (!c->is_worker_side) ++load.failed;
        close(c->fd);
        continue;
      }
      c->in.append(buffer.data(), got);
      if (c->is_worker_side) load.on_worker(c);
      else load.on_client(c, c->stream);
    }
  }
  auto& latencies = load.latencies_us;
  std::sort(latencies.begin(), latencies.end());
  auto at = [&](double q) { return latencies.empty() ? 0.0 : latencies[static_cast<size_t>(q * (latencies.size() - 1))]; };
  std::printf("{\"requests\":%ld,\"chunks\":%ld,\"failed\":%ld,\"seconds\":%.3f,\"p50_us\":%.1f,\"p99_us\":%.1f}\n",
              load.done, load.chunks, load.failed, elapsed, at(0.5), at(0.99));
  return 0;
}
